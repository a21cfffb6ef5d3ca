"""Waiting for room, and what Ray's account of a death becomes. The actors themselves are in
tests/integration/test_ray_server.py."""

import logging
from collections.abc import Callable, Iterator

import pytest

from cluster.actors import End
from cluster.config import EngineOptions, ServeConfig
from cluster.placement import (
    BusyError,
    Node,
    Placement,
    PlacementError,
    RankDemand,
    RankPlace,
    Resources,
)
from cluster.ray_engines import RayEngines, _Actor, summarize
from cluster.ray_reservation import bundle, wait_for_room
from engine.errors import EXIT_FAILED, ConfigError, ServerError

NODE = Node(node_id="aa", address="10.0.0.1", total=Resources(cpus=4), available=Resources(cpus=4))
ROOM = Placement((RankPlace(rank=0, node=NODE, local_rank=0, devices=()),))

Look = Placement | Exception


class Cluster:
    """Answers looks in turn, the last one for ever; every pause takes a second."""

    def __init__(self, *looks: Look, grants: Iterator[bool] | None = None) -> None:
        self._looks = list(looks)
        self._grants = grants
        self.now = 0.0
        self.granted_s: list[float] = []

    def decide(self) -> Placement:
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if isinstance(look, Exception):
            raise look
        return look

    def reserve(self, placement: Placement, timeout_s: float) -> bool:
        self.granted_s.append(timeout_s)
        return True if self._grants is None else next(self._grants)

    def pause(self, _: float) -> None:
        self.now += 1.0

    def wait(self, timeout_s: float = 60.0, pause: Callable[[float], None] | None = None) -> Look:
        return wait_for_room(
            self.decide,
            self.reserve,
            timeout_s=timeout_s,
            joining_s=10.0,
            pause=pause or self.pause,
            clock=lambda: self.now,
        )


def test_a_busy_cluster_is_waited_for() -> None:
    """Ranks are reserved as soon as others have made room."""
    cluster = Cluster(BusyError("full"), BusyError("full"), ROOM)

    assert cluster.wait() is ROOM
    assert cluster.now == 2


def test_a_cluster_that_stays_busy_is_given_up_at_the_deadline() -> None:
    """The error has the comparison, and the flag that sets the wait."""
    cluster = Cluster(BusyError("aa has 1 CPU free of 4"))

    with pytest.raises(ConfigError, match=r"1 CPU free of 4 .*waited 60 s.*--placement-timeout"):
        cluster.wait()
    assert cluster.now == 60


def test_ranks_that_never_fit_are_refused_after_a_grace_for_joining_nodes() -> None:
    """Ten seconds, however long the placement timeout is; and less where that is shorter."""
    cluster = Cluster(PlacementError("aa has 4 CPUs"))
    with pytest.raises(PlacementError, match="4 CPUs"):
        cluster.wait()
    assert cluster.now == 10

    cluster = Cluster(PlacementError("aa has 4 CPUs"))
    with pytest.raises(PlacementError):
        cluster.wait(timeout_s=3)
    assert cluster.now == 3


def test_a_node_that_joins_in_time_is_used() -> None:
    """Too few nodes are not final at once."""
    cluster = Cluster(PlacementError("no node"), PlacementError("no node"), ROOM)

    assert cluster.wait() is ROOM


def test_a_reservation_that_somebody_else_got_is_decided_anew() -> None:
    """What was free when we looked may be gone: look again, in what is left of the time."""
    cluster = Cluster(ROOM, grants=iter([False, True]))

    assert cluster.wait(timeout_s=4) is ROOM
    assert cluster.granted_s == [4, 3]


def test_closing_ends_the_wait() -> None:
    """Whoever closes the server need not wait for the deadline."""

    def closed(_: float) -> None:
        raise ServerError("stopped")

    with pytest.raises(ServerError):
        Cluster(BusyError("full")).wait(pause=closed)


def test_a_bundle_asks_for_what_a_rank_needs() -> None:
    """Amounts of zero are left out: Ray refuses them."""
    assert bundle(RankDemand(cpus=4)) == {"CPU": 4.0}
    assert bundle(RankDemand(cpus=1, gpus=2)) == {"CPU": 1.0, "GPU": 2.0}


def test_a_node_that_takes_two_ranks_with_it_is_one_first_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both deaths are reported, and the log has one cause."""
    deaths: list[tuple[int | None, str]] = []
    config = ServeConfig(engine=EngineOptions(model="scripted"))
    engines = RayEngines(config, lambda *death: deaths.append(death), lambda: bool(deaths))
    caplog.set_level(logging.INFO)

    for index in range(2):
        actor = _Actor(index, f"EngineCore_DP{index}", "aa (10.0.0.1)", handle=None, pid=7)
        engines._report(actor, End(exit_code=EXIT_FAILED, cause="died: node has died"))

    assert [index for index, _ in deaths] == [0, 1]
    [cause] = [r.getMessage() for r in caplog.records if "first cause:" in r.getMessage()]
    assert cause == (
        "first cause: engine core EngineCore_DP0 node=aa (10.0.0.1) pid=7 died: node has died"
    )


KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineCore_DP1
\tpid: 12851
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage, (2) …"""


def test_a_death_is_told_in_one_line_without_advice() -> None:
    """Ray's account has ten lines, most of them guesses."""
    assert summarize(RuntimeError(KILLED)) == (
        "died: worker process has died (SYSTEM_ERROR): Worker unexpectedly exits with a connection"
        " error code 2. End of file."
    )


def test_a_failed_call_is_told_by_its_last_line() -> None:
    """Of a traceback that is the error."""
    error = RuntimeError(
        "ray::EngineCore_DP0.run()\n  File …\nZeroDivisionError: division by zero\n"
    )

    assert summarize(error) == "failed: RuntimeError: ZeroDivisionError: division by zero"
    assert summarize(KeyError()) == "failed: KeyError: "
