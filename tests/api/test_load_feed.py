"""What an API server makes of the coordinator's reports: as frames, and over a real socket."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import zmq

from api.engine_client import EngineClient
from api.load_feed import SILENCE_S, LoadFeed
from engine.bound import ServerWires
from engine.codec import Encoder
from engine.config import CoordinatorAddresses
from engine.errors import EngineDeadError, WireError
from engine.sockets import make_socket
from engine.wire import CoordinatorType, EngineLoad, LoadReport
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.wires import ipc_wires

TIMEOUT_S = 20.0


def frames(*loads: EngineLoad) -> list[bytes]:
    return [CoordinatorType.LOADS.value, *map(bytes, Encoder().encode(LoadReport([*loads])))]


def load(index: int, epoch: int = 0, num_by_client: tuple[int, ...] = ()) -> EngineLoad:
    return EngineLoad(index, epoch, 0, sum(num_by_client), 0.5, [*num_by_client])


# ----------------------------------------------------------------------------------------- frames


def test_each_load_of_a_report_is_handed_on() -> None:
    """And the report is kept: it says which incarnations the coordinator is connected to."""
    taken: list[EngineLoad] = []
    feed = LoadFeed(taken.append)
    assert not feed.has_heard_of(0, 0)
    feed.take(frames(load(0), load(1, epoch=4, num_by_client=(2, 1))), now=1.0)

    assert taken == [load(0), load(1, epoch=4, num_by_client=(2, 1))]
    assert feed.report == LoadReport(taken)
    assert feed.has_heard_of(1, 4)
    assert not feed.has_heard_of(1, 3)
    feed.take(frames(load(0)), now=1.1)
    assert not feed.has_heard_of(1, 4)


@pytest.mark.parametrize(
    "message",
    [
        [b"\x00", b"\x91\x90"],
        [CoordinatorType.LOADS.value],
        [CoordinatorType.LOADS.value, b"\xc1"],
        [CoordinatorType.LOADS.value, b"\x91\x91\x93\x00\x00\x00"],
    ],
)
def test_what_is_no_report_breaks_the_protocol(message: list[bytes]) -> None:
    """Nothing of it is handed on."""
    feed = LoadFeed(lambda load: pytest.fail(f"{load} was handed on"))
    with pytest.raises(WireError):
        feed.take(message, now=0.0)


def test_silence_is_logged_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """After five seconds without a report; what comes then ends it, and it may begin again."""
    caplog.set_level(logging.INFO)
    feed = LoadFeed(lambda load: None)
    for tenths in range(200):
        feed.check_silence(tenths / 10)
    assert [r.levelname for r in caplog.records] == ["WARNING"]

    feed.take(frames(), now=20.0)
    feed.check_silence(20.0 + SILENCE_S)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    feed.check_silence(20.1 + SILENCE_S)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_silence_while_this_process_was_stopped_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reports may be there, unread."""
    feed = LoadFeed(lambda load: None)
    feed.check_silence(0.0)
    feed.give_new_chance(100.0)
    feed.check_silence(100.0 + SILENCE_S)

    assert not caplog.records


# --------------------------------------------------------------------------------------- a socket


class Publisher:
    """The coordinator's XPUB. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.addresses = CoordinatorAddresses(
            request="", output="", publish=f"ipc://{folder}/publish"
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, zmq.XPUB)
        self._socket.bind(self.addresses.publish)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def publish(self, *loads: EngineLoad) -> None:
        self._socket.send_multipart(frames(*loads))

    def publish_rubbish(self) -> None:
        self._socket.send_multipart([CoordinatorType.LOADS.value, b"\xc1"])


@contextlib.contextmanager
def following(
    wires: ServerWires, publisher: Publisher, num_engines: int = 2
) -> Iterator[EngineClient]:
    client = EngineClient(num_engines, client_index=1)
    client.bind(wires)
    client.follow(publisher.addresses)
    try:
        yield client
    finally:
        client.close()


async def ready(client: EngineClient, publisher: Publisher, *loads: EngineLoad) -> None:
    """Publish until the client is ready: what is said before it subscribes is lost."""
    waiting = asyncio.create_task(client.wait_ready(TIMEOUT_S))
    while not waiting.done():
        publisher.publish(*loads)
        await asyncio.sleep(0.01)
    await waiting


def test_reports_reach_the_balancer(tmp_path: Path) -> None:
    """The others' requests are what was published less our own share; a load of an incarnation
    that is gone, and rubbish, are dropped. The metrics hear what the balancer hears."""
    wires = ipc_wires(tmp_path)
    heard: dict[int, EngineLoad] = {}

    async def work(client: EngineClient, publisher: Publisher) -> None:
        client.on_load = heard.__setitem__
        await ready(client, publisher, load(0), load(1))
        publisher.publish(load(0, num_by_client=(4, 3)), load(1))
        publisher.publish_rubbish()
        publisher.publish(load(0, epoch=7, num_by_client=(9, 9)))
        publisher.publish(load(2))
        publisher.publish(load(1, num_by_client=(6, 0, 1)))
        while client.balancer.loads[1].num_others != 7:  # noqa: ASYNC110 - it is no event
            await asyncio.sleep(0.002)
        assert [each.num_others for each in client.balancer.loads] == [4, 7]
        assert client.num_bad_messages == 2
        assert client.num_stale_messages == 1
        assert heard == {
            0: load(0, num_by_client=(4, 3)),
            1: load(1, num_by_client=(6, 0, 1)),
        }

    with FakeEngine(wires), FakeEngine(wires, index=1), Publisher(tmp_path) as publisher:
        with following(wires, publisher) as client:
            asyncio.run(asyncio.wait_for(work(client, publisher), TIMEOUT_S))


def test_a_server_is_ready_when_the_coordinator_knows_every_rank(tmp_path: Path) -> None:
    """READY of all ranks is not enough: the sockets' names are removed then, and whoever had not
    reached the coordinator never would. The error says which rank is missing."""
    wires = ipc_wires(tmp_path)

    async def work(client: EngineClient, publisher: Publisher) -> None:
        waiting: Any = asyncio.create_task(client.wait_ready(1.0))
        while not waiting.done():
            publisher.publish(load(0))
            await asyncio.sleep(0.01)
        with pytest.raises(
            EngineDeadError, match=r"coordinator has no READY within 1 s .* core DP1 "
        ):
            await waiting

    with FakeEngine(wires), FakeEngine(wires, index=1), Publisher(tmp_path) as publisher:
        with following(wires, publisher) as client:
            asyncio.run(asyncio.wait_for(work(client, publisher), TIMEOUT_S))
