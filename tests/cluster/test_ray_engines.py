"""Waiting for room and for actors, and what Ray's account of a death becomes. The actors themselves
are in tests/integration/test_ray_server.py."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.actors import End
from cluster.config import EngineOptions, ServeConfig
from cluster.deadline import Deadline
from cluster.placement import (
    BusyError,
    Node,
    Placement,
    PlacementError,
    RankDemand,
    RankPlace,
    Resources,
)
from cluster.ray_actors import Actor, answers, summarize
from cluster.ray_engines import RayEngines
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


@pytest.mark.row("F-20")
def test_a_cluster_that_stays_busy_is_given_up_at_the_deadline() -> None:
    """The error has the comparison, and the flag that sets the wait."""
    cluster = Cluster(BusyError("aa has 1 CPU free of 4"))

    with pytest.raises(ConfigError, match=r"1 CPU free of 4 .*waited 60 s.*--placement-timeout"):
        cluster.wait()
    assert cluster.now == 60


@pytest.mark.row("F-20")
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


# ------------------------------------------------------------------------------ waiting for actors


def make_actor(index: int, pid: int = 0) -> Actor:
    title = f"EngineCore_DP{index}"
    return Actor(
        kind="engine core", title=title, node="aa (10.0.0.1)", handle=None, index=index, pid=pid
    )


class FakeRay:
    """Calls are names, and end with what they were given; those without never end."""

    def __init__(self, **ends: object) -> None:
        self._ends = ends
        self.num_rounds = 0

    def wait(
        self, calls: list[str], num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        self.num_rounds += 1
        done = [call for call in calls if call in self._ends][:num_returns]
        return done, [call for call in calls if call not in done]

    def get(self, call: str) -> object:
        end = self._ends[call]
        if isinstance(end, Exception):
            raise end
        return end


def ask(ray: FakeRay, *calls: str, deadline: Deadline, **settings: Any) -> list[Any]:
    actors = [make_actor(index, **settings) for index in range(len(calls))]
    return answers(ray, actors, calls, deadline, lambda: None)


def test_answers_come_in_the_order_of_the_calls() -> None:
    """Whichever is first; and two may be to one actor."""
    assert ask(FakeRay(b=2, a=1), "a", "b", deadline=Deadline(60)) == [1, 2]


def test_an_actor_that_fails_at_once_ends_the_start_at_once() -> None:
    """The others, which may come up for long, are not waited for."""
    ray = FakeRay(b=RuntimeError(KILLED))

    with pytest.raises(ServerError, match=r"EngineCore_DP1 node=aa .* could not be started: died:"):
        ask(ray, "a", "b", "c", deadline=Deadline(3600))
    assert ray.num_rounds == 1


def test_a_refusal_of_settings_names_the_node() -> None:
    """Ray wraps what an actor raises."""
    wrapped = RuntimeError("ray::EngineCore_DP0.describe()")
    wrapped.cause = ConfigError("no such device")  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match=r"on node aa \(10\.0\.0\.1\): no such device"):
        ask(FakeRay(a=wrapped), "a", deadline=Deadline(60))


@pytest.mark.row("F-22")
def test_who_is_late_is_named_with_the_last_that_was_heard() -> None:
    """At the deadline; those who have answered are not."""
    with pytest.raises(ServerError) as late:
        ask(FakeRay(a=1), "a", "b", "c", deadline=Deadline(0.01))
    assert str(late.value) == (
        "Ray has not started all within 0.01 s (--startup-timeout); missing:"
        " engine core EngineCore_DP1 node=aa (10.0.0.1) (no sign yet),"
        " engine core EngineCore_DP2 node=aa (10.0.0.1) (no sign yet)"
    )
    with pytest.raises(ServerError, match=r"pid=7 \(started, then silent\)"):
        ask(FakeRay(), "a", deadline=Deadline(0.01), pid=7)


def test_all_steps_of_a_start_share_one_deadline() -> None:
    """It runs from when it was made, not anew with each wait."""
    over = Deadline(5.0, began_s=time.monotonic() - 6.0)

    assert over.is_over
    assert over.left_s == 0
    with pytest.raises(ServerError, match="within 5 s"):
        ask(FakeRay(), "a", deadline=over)
    assert ask(FakeRay(a=1), "a", deadline=over) == [1]  # what is there counts all the same


def test_closing_ends_the_wait_for_actors() -> None:
    """Within one round."""

    def closed() -> None:
        raise ServerError("stopped")

    with pytest.raises(ServerError, match="stopped"):
        answers(FakeRay(), [make_actor(0)], ["a"], Deadline(3600), closed)


# ------------------------------------------------------------------------------------------- deaths


@pytest.mark.row("F-13")
def test_a_node_that_takes_two_ranks_with_it_is_one_first_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both deaths are reported, and the log has one cause."""
    deaths: list[tuple[int | None, int, str]] = []
    config = ServeConfig(engine=EngineOptions(model="scripted"))
    engines = RayEngines(config, lambda *death: deaths.append(death), lambda *_: bool(deaths))
    caplog.set_level(logging.INFO)

    for index in range(2):
        actor = make_actor(index, pid=7)
        engines._watch._report(actor, End(exit_code=EXIT_FAILED, cause="died: node has died"))

    assert [index for index, _, _ in deaths] == [0, 1]
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
