"""Threads and order around the decision to replace a rank: who is told, when, what is logged."""

import logging
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from api.engine_handle import Loss
from cluster import replacement, replacer
from cluster.engine_group import EngineGroup
from cluster.replacer import Replacer
from engine.errors import EXIT_CONFIG, EngineDeadError, ServerError
from engine.wire import EngineReady, Fingerprint
from tests.helpers.server import wait_for


class World:
    """Two ranks and API servers that remember what they are told."""

    def __init__(self, start_timeout_s: float = 60.0) -> None:
        self.lost: list[tuple[int, int, str]] = []
        self.restarted: list[tuple[int, int]] = []
        self.exit_codes: list[int | None] = [None, None]
        self.nodes: list[str | None] = [None, None]
        self.failures: list[Exception] = []
        self.death: EngineDeadError | None = None
        self.is_draining = False
        self.has_restarted = threading.Semaphore(0)
        self.replacer = Replacer(
            2, start_timeout_s=start_timeout_s, is_draining=lambda: self.is_draining
        )
        self.replacer.attach(self, cast(EngineGroup, self))
        self.replacer.serve()

    def lose(self, engine_index: int, epoch: int, cause: str) -> None:
        self.lost.append((engine_index, epoch, cause))

    def mark_dead(self, engine_index: int | None, cause: str) -> None:
        self.death = EngineDeadError(engine_index, cause)

    def node_of(self, engine_index: int) -> str | None:
        return self.nodes[engine_index]

    def restart(self, engine_index: int, epoch: int) -> None:
        self.restarted.append((engine_index, epoch))
        self.has_restarted.release()
        if self.failures:
            raise self.failures.pop()

    def restart_coordinator(self, epoch: int) -> None:
        self.restart(-1, epoch)

    def wait_for_restart(self) -> None:
        assert self.has_restarted.acquire(timeout=10)


def ready(index: int, epoch: int) -> EngineReady:
    values: dict[str, Any] = dict.fromkeys(EngineReady.__struct_fields__, 0)
    fingerprint = Fingerprint(1, "", {}, "", "")
    return EngineReady(
        **{**values, "engine_index": index, "epoch": epoch, "fingerprint": fingerprint}
    )


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.replacer.close()


def first_causes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "first cause:" in r.getMessage()]


def test_a_dead_process_is_followed_by_another(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """API servers are told, a new one is started, and the log says how many serve meanwhile."""
    caplog.set_level(logging.INFO)
    world.replacer.on_death(1, 0, "killed")
    world.wait_for_restart()
    assert world.lost == [(1, 0, "killed")]
    assert world.restarted == [(1, 1)]
    assert "engine core DP1 is replaced, under epoch 1; 1 of 2 ranks serve" in caplog.text
    assert world.replacer.loading == [1]

    world.replacer.on_up(ready(1, 1))
    assert "engine core DP1 is back under epoch 1; 2 of 2 ranks serve" in caplog.text
    assert world.replacer.loading == []


def test_one_loss_is_replaced_once(world: World) -> None:
    """Its last words come, then it ends; who tells of it second has no effect."""
    world.replacer.on_loss(Loss(1, 0, "out of luck"))
    world.replacer.on_death(1, 0, "exit code 1")
    world.wait_for_restart()
    assert world.restarted == [(1, 1)]
    assert world.replacer.has_said_why(1, 0)
    assert not world.replacer.has_said_why(1, 1)


def test_who_hangs_is_a_first_cause(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """API servers leave the logging to us; two that see it make one line."""
    for _ in range(2):
        world.replacer.on_loss(Loss(0, 0, "hung: no heartbeat", is_first=True))
    world.wait_for_restart()
    assert first_causes(caplog) == ["first cause: engine core DP0: hung: no heartbeat"]


@pytest.mark.row("F-13")
def test_a_node_that_takes_two_ranks_along_is_one_first_cause(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever tells of it; the second line names the rank whose cause it is."""
    world.nodes = ["far", "far"]
    world.replacer.on_loss(Loss(1, 0, "hung: no heartbeat", is_first=True))
    assert world.replacer.has_said_why(0, 0)
    world.replacer.on_loss(Loss(0, 0, "hung: no heartbeat", is_first=True))

    assert first_causes(caplog) == ["first cause: engine core DP1: hung: no heartbeat"]
    assert "engine core DP0 is lost with engine core DP1, whose first cause is" in caplog.text


@pytest.mark.parametrize("nodes", [["far", "further"], ["far", None], [None, None]])
def test_ranks_that_do_not_share_a_node_have_a_first_cause_each(
    world: World, nodes: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    """None is the command's own, which takes the command along."""
    world.nodes = nodes
    for index in range(2):
        world.replacer.on_loss(Loss(index, 0, "hung", is_first=True))
    assert len(first_causes(caplog)) == 2


def test_a_start_that_fails_is_tried_again_and_then_the_server_ends(world: World) -> None:
    """Three times in all, with the cause of the last."""
    world.failures = [ServerError("no process")] * 3
    world.replacer.on_death(1, 0, "killed")
    wait_for(lambda: world.death is not None, "the end", 30)
    assert world.death is not None
    assert world.death.cause == "no process; it has failed to start 3 times in a row"
    assert world.restarted == [(1, 1), (1, 2), (1, 3)]


def test_last_words_of_one_that_starts_wait_for_its_exit_code(world: World) -> None:
    """It may say that there is no hope: what was refused will be refused again."""
    world.replacer.on_death(1, 0, "killed")
    world.wait_for_restart()
    world.replacer.on_loss(Loss(1, 1, "the model is gone"))
    assert world.death is None
    world.exit_codes[1] = EXIT_CONFIG
    world.replacer.on_death(1, 1, "exit code 2")
    assert world.death is not None
    assert world.death.cause == "the model is gone"


def test_one_that_is_not_ready_in_time_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    """It may be stopped, and then nobody would ever hear of it."""
    world = World(start_timeout_s=0.2)
    world.replacer.on_death(1, 0, "killed")
    world.wait_for_restart()
    world.wait_for_restart()
    world.replacer.close()
    assert world.restarted == [(1, 1), (1, 2)]
    assert first_causes(caplog)[:1] == ["first cause: engine core DP1: no READY within 0 s"]


def test_nothing_is_started_while_the_server_ends(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its streams go on at the others."""
    world.is_draining = True
    world.replacer.on_death(1, 0, "killed")
    assert world.lost == [(1, 0, "killed")]
    assert world.restarted == []
    assert "engine core DP1 is not replaced while the server ends; 1 of 2" in caplog.text


def test_the_coordinator_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as it dies; one that cannot be started at all ends the server."""
    monkeypatch.setattr(replacer, "_COORDINATOR_LASTS_S", 0.1)
    world.replacer.on_death(None, 0, "killed")
    world.wait_for_restart()
    assert world.restarted == [(-1, 1)]
    assert world.death is None

    world.failures = [ServerError("no process")] * 3
    wait_for(lambda: world.replacer._coordinator.num_up == 1, "the new one")
    world.replacer.on_death(None, 1, "killed")
    wait_for(lambda: world.death is not None, "the end", 30)


def test_a_coordinator_that_starts_and_ends_at_once_ends_the_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a process each time, and never serves: three tries, as for a rank."""
    monkeypatch.setattr(replacement, "FIRST_DELAY_S", 0.0)
    for epoch in range(4):
        world.replacer.on_death(None, epoch, "exit code 1")
        if epoch < 3:
            world.wait_for_restart()
            assert world.death is None

    assert world.death is not None
    assert world.death.cause == "exit code 1; it has failed to start 3 times in a row"
    assert world.restarted == [(-1, 1), (-1, 2), (-1, 3)]
