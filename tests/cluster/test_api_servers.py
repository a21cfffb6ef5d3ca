"""Several API servers and what the command does when one of them misbehaves. The children here only
talk; real ones are in tests/integration/test_processes.py and tests/faults."""

import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from api.config import ApiConfig
from api.engine_handle import Loss
from cluster import api_server_children, api_servers, replacement
from cluster.api_server_process import ApiServerConfig
from cluster.api_servers import ApiServers
from cluster.channel import Pong
from cluster.deadline import Deadline
from cluster.supervisor import Child
from engine.bound import BoundSocket, ServerWires
from engine.lifecycle import StopFlag
from engine.wire import EngineReady
from tests.helpers.server import wait_for
from tests.helpers.talking_children import hang_as_newcomer, talk_nonsense


class Ranks:
    """Nothing happens to them."""

    def on_loss(self, loss: Loss) -> None: ...

    def on_up(self, ready: EngineReady) -> None: ...


class World:
    """Two API servers that run `main`, and the command around them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.stop = StopFlag()
        self.has_served = threading.Event()
        self.codes: list[int] = []
        self._thread: threading.Thread | None = None

    def serve(self, main: Callable[..., None], *, replaces: bool) -> ApiServers:
        def child(config: ApiServerConfig, _: socket.socket, connection: object) -> Child:
            arguments = (config.client_index, config.joins, connection)
            return Child(kind="API server", title=config.title, main=main, arguments=arguments)

        self._monkeypatch.setattr(api_server_children, "_child", child)
        self._monkeypatch.setattr(api_servers, "_LAST_ANSWERS_S", 0.0)
        api = ApiConfig(served_model_names=("m",), start_timeout_s=60.0, shutdown_timeout_s=0.0)
        configs = [
            ApiServerConfig(
                api=api, client_index=index, num_engines=1, step_timeout_s=60.0, log_level="INFO"
            )
            for index in range(2)
        ]
        sockets = [socket.create_server(("127.0.0.1", 0), reuse_port=True)]
        sockets.append(socket.create_server(sockets[0].getsockname()[:2], reuse_port=True))
        front = ApiServers(
            configs, sockets, lambda *_: self.has_served.set(), Ranks() if replaces else None
        )

        def start() -> Path:
            wires = [
                ServerWires(request=BoundSocket("ipc://r"), output=BoundSocket("ipc://o"))
                for _ in configs
            ]
            front.bind(wires)
            front.begin(Path("folder"), None, Deadline(60.0))
            return Path("folder")

        self._thread = threading.Thread(
            target=lambda: self.codes.append(front.run(start, self.stop)), daemon=True
        )
        self._thread.start()
        assert self.has_served.wait(30)
        return front

    def close(self) -> None:
        self.stop.set()
        if self._thread is not None:
            self._thread.join(30)
            assert not self._thread.is_alive()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    world.close()


def first_causes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "first cause:" in r.getMessage()]


def test_a_newcomer_that_hangs_while_it_loads_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And in the end the server ends, with that cause: nobody else would ever hear of it."""
    front = world.serve(hang_as_newcomer, replaces=True)
    monkeypatch.setattr(replacement, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(api_servers, "_SPEAKS_LAST_S", 0.2 - 60.0)
    pid = front._supervisor.pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    wait_for(lambda: front.death is not None, "the end", 40)
    killed, *hung = first_causes(caplog)
    assert f"APIServer_1 pid={pid} " in killed
    assert "SIGKILL" in killed
    assert len(hung) == 3
    assert all("has not loaded within 60 s" in each for each in hung)
    assert front.death is not None
    assert "has not loaded" in front.death.cause


@pytest.mark.parametrize("replaces", [True, False])
def test_one_that_cannot_be_understood_is_as_good_as_dead(
    world: World, caplog: pytest.LogCaptureFixture, *, replaces: bool
) -> None:
    """Nobody would hear of deaths from it, nor whether it answers."""
    front = world.serve(talk_nonsense, replaces=replaces)
    [pid, other] = front._supervisor.pids[1], front._supervisor.pids[0]

    wait_for(lambda: first_causes(caplog), "a first cause")
    [cause] = first_causes(caplog)
    assert f"APIServer_1 pid={pid} cannot be followed: DecodeError: " in cause
    if replaces:
        wait_for(lambda: front._supervisor.epochs == [0, 1], "another in its place")
        assert front._supervisor.pids[0] == other
    assert (front.death is None) == replaces


def test_a_stop_while_one_waits_to_be_replaced_is_in_order(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its death was a loss with a first cause, and is no crash of the drain as well."""
    front = world.serve(hang_as_newcomer, replaces=True)
    monkeypatch.setattr(replacement, "FIRST_DELAY_S", 2.0)

    def kill(epoch: int) -> None:
        wait_for(lambda: front._supervisor.epochs[1] == epoch, "one to kill")
        pid = front._supervisor.pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: front._policy.is_known(1, epoch), "its loss")

    kill(0)
    kill(1)  # whose successor has to wait
    world.close()
    assert world.codes == [0]
    assert len(first_causes(caplog)) == 2


def test_the_last_answer_of_one_that_died_is_none_of_its_successors(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that would be asked while it loads, when nobody answers, and be taken for hung."""
    front = world.serve(hang_as_newcomer, replaces=True)
    hear_out = front._children.hear_out

    def hear_out_late(index: int) -> None:
        hear_out(index)
        front._take(index, Pong([]))  # as its listener does

    monkeypatch.setattr(front._children, "hear_out", hear_out_late)
    pid = front._supervisor.pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    wait_for(lambda: front._supervisor.epochs[1] == 1, "another in its place")
    assert 1 not in front._pulse.due(math.inf)


def test_without_any_api_server_the_server_ends_and_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has any stream to go on with."""
    front = world.serve(hang_as_newcomer, replaces=True)
    for pid in front._supervisor.pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    wait_for(lambda: front.death is not None, "the end")
    assert "the server ends: no API server is left that answers" in caplog.text
    assert len(first_causes(caplog)) == 2
    world.close()
    assert world.codes == [1]
