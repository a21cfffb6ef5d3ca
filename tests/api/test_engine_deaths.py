"""What follows when an engine core is gone, seen from the requests of one API server: over real
sockets, with engine cores that speak wire 1 from threads. Losses are in test_handover.py."""

import asyncio
import time
from pathlib import Path

import pytest

from engine.bound import ServerWires
from engine.errors import EngineDeadError
from tests.helpers.connected_client import connected, make_request, run_once, until
from tests.helpers.fake_engine import FakeEngine, endless_answer
from tests.helpers.outputs import read
from tests.helpers.wires import ipc_wires


@pytest.fixture
def wires(tmp_path: Path) -> ServerWires:
    return ipc_wires(tmp_path)


def test_last_words_fail_everything_pending_and_later(wires: ServerWires) -> None:
    """Streams, UTILITY calls and new requests, all with the cause."""

    async def work() -> None:
        async with connected(wires) as client:
            engine.is_paused = True
            stream = client.stream(make_request())
            await until(lambda: engine.running)
            # As if the call had reached the core in its last moment: nobody will answer it.
            engine.answers_calls = False
            pending = asyncio.create_task(client.utility("statistics"))
            await until(lambda: client.num_pending_calls)
            client.mark_dead(0, "out of memory")
            with pytest.raises(EngineDeadError, match="out of memory"):
                await read(stream)
            with pytest.raises(EngineDeadError):
                await pending
            with pytest.raises(EngineDeadError, match="out of memory"):
                client.stream(make_request("later"))
            with pytest.raises(EngineDeadError):
                await client.utility("statistics")

    with FakeEngine(wires, endless_answer) as engine:
        run_once(work())


def test_dead_message_is_a_death(wires: ServerWires) -> None:
    """The engine core's own last words arrive, with their cause."""

    async def work() -> None:
        async with connected(wires) as client:
            deaths: list[EngineDeadError] = []
            client.deaths.on_death = lambda death, is_first: deaths.append(death)
            stream = client.stream(make_request())
            await until(lambda: engine.running)
            await asyncio.to_thread(engine.die, "worker 1 was killed")
            with pytest.raises(EngineDeadError, match="worker 1 was killed"):
                await read(stream)
            client.mark_dead(0, "a later cause changes nothing")
            assert client.death is not None
            assert client.death.cause == "worker 1 was killed"
            assert len(deaths) == 1

    with FakeEngine(wires, endless_answer) as engine:
        run_once(work())


def test_silent_core_is_a_hung_core(wires: ServerWires, caplog: pytest.LogCaptureFixture) -> None:
    """No heartbeat: pending calls fail, and the log says so once, with where it was."""

    async def work() -> None:
        async with connected(wires, heartbeat_timeout_s=0.4) as client:
            engine.is_paused = True
            stream = client.stream(make_request())
            await until(lambda: engine.running and client.engines[0].heartbeat)
            engine.is_silent = True
            with pytest.raises(EngineDeadError, match="no heartbeat"):
                await read(stream)
            assert client.engines[0].state == "hung"

    with FakeEngine(wires) as engine:
        run_once(work())
    causes = [r.message for r in caplog.records if "first cause:" in r.message]
    assert len(causes) == 1
    assert "EXECUTE" in causes[0]


def test_step_that_takes_too_long_is_a_hung_core(wires: ServerWires) -> None:
    """Heartbeats go on, but say that the step does not end."""

    async def work() -> None:
        async with connected(wires, heartbeat_timeout_s=2.0, step_timeout_s=300.0) as client:
            engine.heartbeat_age_ms = 311_000
            await until(lambda: client.death)
            assert client.death is not None
            assert "no progress" in client.death.cause

    with FakeEngine(wires) as engine:
        run_once(work())


def test_core_that_beats_is_not_hung(wires: ServerWires) -> None:
    """Four times the limit pass without a request, and nothing happens."""

    async def work() -> None:
        async with connected(wires, heartbeat_timeout_s=0.4) as client:
            first = client.engines[0].last_seen
            await until(lambda: client.engines[0].last_seen > first + 1.6)
            assert client.death is None

    with FakeEngine(wires):
        run_once(work())


def test_own_pause_is_not_the_cores_fault(wires: ServerWires) -> None:
    """A process that was stopped itself looks at its mail before it calls anybody dead."""

    async def work() -> None:
        async with connected(wires, heartbeat_timeout_s=0.4) as client:
            time.sleep(1.0)  # noqa: ASYNC251  # the whole loop stands still: that is the point
            await until(
                lambda: client.engines[0].last_seen > asyncio.get_running_loop().time() - 0.1
            )
            assert client.death is None

    with FakeEngine(wires):
        run_once(work())


def test_unreachable_core_fails_the_request_and_then_is_dead(wires: ServerWires) -> None:
    """A send that cannot be routed means that the rank is down, if nobody else says why first."""

    async def work() -> None:
        async with connected(wires) as client:
            await asyncio.to_thread(engine.vanish)

            def is_refused() -> bool:
                try:
                    client.stream(make_request(str(time.monotonic())))
                except EngineDeadError:
                    return True
                return False

            await until(is_refused)
            await until(lambda: client.death)
            assert client.death is not None
            assert client.death.cause == "its connection is gone"

    with FakeEngine(wires) as engine:
        run_once(work())
