"""Whom an API server waits for before it serves: over real sockets, with engine cores that speak
wire 1 from threads. What the coordinator has to have heard is in test_load_feed.py."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from api.engine_client import EngineClient
from engine.bound import ServerWires
from engine.errors import ConfigError, EngineDeadError
from tests.helpers.connected_client import TIMEOUT_S, connected, run_once, until
from tests.helpers.fake_engine import FINGERPRINT, FakeEngine
from tests.helpers.wires import ipc_wires


@pytest.fixture
def wires(tmp_path: Path) -> ServerWires:
    return ipc_wires(tmp_path)


def test_death_before_ready_ends_the_wait(wires: ServerWires) -> None:
    """A core that cannot load says why, and nobody waits for it any longer."""

    async def work() -> None:
        client = EngineClient()
        client.bind(wires)
        try:
            await asyncio.to_thread(engine.die, "no such model")
            await client.wait_ready(TIMEOUT_S)
        finally:
            client.close()

    with FakeEngine(wires, is_ready=False) as engine:
        with pytest.raises(EngineDeadError, match="no such model"):
            run_once(work())


@pytest.mark.row("F-22")
def test_core_that_differs_is_refused_with_the_difference(wires: ServerWires) -> None:
    """Two ranks with different packages would answer differently."""
    other = msgspec.structs.replace(FINGERPRINT, packages={"torch": "2.12"})

    async def work() -> None:
        async with connected(wires, num_engines=2):
            pass

    with FakeEngine(wires), FakeEngine(wires, index=1, fingerprint=other):
        with pytest.raises(ConfigError, match=r"differs from engine core DP.: torch 2\.1"):
            run_once(work())


def test_only_core_is_refused_if_it_differs_from_what_is_expected(wires: ServerWires) -> None:
    """It may run on another node, with other files."""

    async def work() -> None:
        client = EngineClient()
        client.bind(wires)
        client.expect(msgspec.structs.replace(FINGERPRINT, code="ours"))
        try:
            await client.wait_ready(TIMEOUT_S)
        finally:
            client.close()

    with FakeEngine(wires):
        with pytest.raises(ConfigError, match="differs from the command: code code instead of our"):
            run_once(work())


def test_missing_core_is_named_at_the_deadline(wires: ServerWires) -> None:
    """One of two says READY: the error says which did not."""

    async def work() -> None:
        client = EngineClient(2)
        client.bind(wires)
        try:
            await client.wait_ready(0.3)
        finally:
            client.close()

    with FakeEngine(wires):
        with pytest.raises(EngineDeadError, match=r"no READY .* engine core DP1 \(no heartbeat"):
            run_once(work())


def test_people_read_ranks_and_peers_indices(wires: ServerWires) -> None:
    """If a server's first rank is 2, engine core 1 is DP3 in texts, and 1 wherever it counts."""

    async def work() -> None:
        client = EngineClient(2, first_rank=2)
        client.bind(wires)
        try:
            with pytest.raises(EngineDeadError, match=r"from engine core DP3 \(no heartbeat"):
                await client.wait_ready(0.3)
            assert client.death is not None
            assert client.death.rank == 3
            assert str(client.death).startswith("engine core DP3 is dead: no READY")
            assert [engine.state for engine in client.engines] == ["up", "dead"]
        finally:
            client.close()

    with FakeEngine(wires):
        run_once(work())


def test_start_that_takes_too_long_says_where_it_was(wires: ServerWires) -> None:
    """A core beats while it loads."""

    async def work() -> None:
        async with loading(wires) as client:
            await client.wait_ready(0.1)

    with FakeEngine(wires, is_ready=False) as engine:
        engine.heartbeat_age_ms = 20_000
        with pytest.raises(EngineDeadError, match=r"step 0, LOADING for 20\.0 s"):
            run_once(work())


def test_long_start_is_no_long_step(wires: ServerWires) -> None:
    """How long a core was loading is not held against its first step."""

    async def work() -> None:
        async with loading(wires) as client:
            engine.is_silent = True
            engine.become_ready()
            await client.wait_ready(TIMEOUT_S)
            client._check_heartbeats()
            assert client.death is None

    with FakeEngine(wires, is_ready=False) as engine:
        engine.heartbeat_age_ms = 20_000
        run_once(work())


@contextlib.asynccontextmanager
async def loading(wires: ServerWires) -> AsyncIterator[EngineClient]:
    """A client that has heard the first heartbeat of a core which is not ready."""
    client = EngineClient(step_timeout_s=1.0)
    client.bind(wires)
    try:
        client._attach()
        await until(lambda: client.engines[0].heartbeat)
        yield client
    finally:
        client.close()
