"""What the coordinator makes of what it hears; and ranks, API servers and coordinator together,
with messages that arrive in any order between links."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.coordinator import Coordinator, Start
from engine.errors import WireError
from engine.wire import (
    EngineCoreOutputs,
    EngineDead,
    EngineLoad,
    FirstRequest,
    Heartbeat,
    LoadReport,
    Phase,
    SchedulerStats,
    StartWave,
)
from tests.helpers.wave_world import World


def load(index: int, epoch: int = 0, num_running: int = 1, **fields: Any) -> EngineCoreOutputs:
    stats = SchedulerStats(2, num_running, 0.5, num_by_client=[1, num_running + 1])
    return EngineCoreOutputs(index, epoch, stats=stats, **fields)


def with_ranks(num_engines: int = 3) -> Coordinator:
    """All of them ready, and a report has gone out at time 0."""
    coordinator = Coordinator(num_engines)
    for index in range(num_engines):
        assert coordinator.take_ready(index, 0) == []
    assert coordinator.take_report(0.0) is not None
    return coordinator


def woken(starts: list[Start]) -> list[int]:
    return [start.engine_index for start in starts]


# ---------------------------------------------------------------------------------------- reports


def test_a_report_holds_the_latest_load_of_each_rank() -> None:
    """In the order of the ranks, with the requests of each API server."""
    coordinator = with_ranks()
    for outputs in (load(2), load(0, num_running=7), load(0, num_running=4)):
        coordinator.take_outputs(outputs)

    assert coordinator.take_report(1.0) == LoadReport(
        [EngineLoad(0, 0, 2, 4, 0.5, [1, 5]), EngineLoad(2, 0, 2, 1, 0.5, [1, 2])]
    )


def test_a_successor_knows_ranks_by_their_heartbeats() -> None:
    """READY was said to the one before. One that is idle has no load and will tell none; one that
    works is in the report with its next step; one that loads says READY."""
    successor = Coordinator(3, is_successor=True)
    for index, phase in enumerate((Phase.IDLE, Phase.EXECUTE, Phase.LOADING)):
        successor.take_heartbeat(Heartbeat(index, 4, 9, 0, phase))
    assert successor.take_report(0.0) == LoadReport([EngineLoad(0, 4, 0, 0, 0.0)])

    successor.take_outputs(load(1, epoch=4))
    report = successor.take_report(1.0)
    assert report is not None
    assert [each.engine_index for each in report.loads] == [0, 1]


def test_a_heartbeat_is_no_news_to_the_first() -> None:
    """A rank is in its reports once both of its wires work."""
    coordinator = Coordinator(1)
    coordinator.take_heartbeat(Heartbeat(0, 0, 9, 0, Phase.IDLE))
    assert coordinator.take_report(0.0) == LoadReport([])


def test_changes_are_collected_for_a_tenth_of_a_second() -> None:
    """However many there are; the first after a pause goes out at once."""
    coordinator = with_ranks()
    reports = 0
    for millisecond in range(1, 1001):
        coordinator.take_outputs(load(0, num_running=millisecond))
        reports += coordinator.take_report(millisecond / 1000) is not None
    assert reports in (9, 10)

    coordinator.take_outputs(load(0, num_running=5000))
    assert coordinator.report_due_at <= 1.5
    assert coordinator.take_report(1.5) is not None


def test_without_changes_a_report_comes_every_second() -> None:
    """The same load again is no change, and neither are outputs without statistics."""
    coordinator = with_ranks()
    coordinator.take_outputs(load(0))
    assert coordinator.take_report(0.1) is not None
    coordinator.take_outputs(load(0))
    coordinator.take_outputs(EngineCoreOutputs(0, 0))

    assert coordinator.take_report(1.0) is None
    assert coordinator.report_due_at == 1.1
    assert coordinator.take_report(1.1) is not None


def test_a_wave_that_starts_or_ends_is_reported_at_once() -> None:
    """Not a tenth of a second later."""
    coordinator = with_ranks()
    coordinator.take_outputs(load(0, start_wave=0))
    assert coordinator.take_report(0.001) == LoadReport(
        [EngineLoad(0, 0, 2, 1, 0.5, [1, 2])], 0, True
    )
    coordinator.take_outputs(EngineCoreOutputs(0, 0, wave_complete=0))
    assert coordinator.take_report(0.002) == LoadReport(
        [EngineLoad(0, 0, 2, 1, 0.5, [1, 2])], 1, False
    )


def test_a_rank_that_dies_is_reported_no_more() -> None:
    """Nor does anything that it said before bring it back."""
    coordinator = with_ranks()
    coordinator.take_outputs(load(1))
    coordinator.take_report(1.0)
    coordinator.take_dead(EngineDead("ENGINE_CORE_DEAD", 1, 0, "cause"))
    assert coordinator.take_report(1.1) == LoadReport([])

    coordinator.take_outputs(load(1))
    coordinator.take_ready(1, 0)
    assert coordinator.take_report(2.1) == LoadReport([])
    assert coordinator.num_stale_messages == 2


def test_a_rank_is_reported_once_both_its_wires_work() -> None:
    """READY and the load come on two sockets, in any order."""
    coordinator = Coordinator(2)
    coordinator.take_ready(0, 0)
    coordinator.take_outputs(load(1))
    assert coordinator.take_report(0.0) == LoadReport([])
    coordinator.take_outputs(load(0))
    coordinator.take_ready(1, 0)
    report = coordinator.take_report(0.1)
    assert report is not None
    assert [each.engine_index for each in report.loads] == [0, 1]


def test_an_earlier_incarnation_is_not_heard() -> None:
    """Its load, waves and last words are dropped and counted, once the new one has spoken."""
    coordinator = with_ranks()
    coordinator.take_outputs(load(1, epoch=3))
    coordinator.take_ready(1, 3)
    for outputs in (load(1, num_running=9), load(1, epoch=2, start_wave=5, wave_complete=6)):
        assert coordinator.take_outputs(outputs) == []
    coordinator.take_dead(EngineDead("ENGINE_CORE_DEAD", 1, 2, "cause"))

    assert coordinator.num_stale_messages == 3
    assert coordinator.take_report(1.0) == LoadReport([EngineLoad(1, 3, 2, 1, 0.5, [1, 2])])


def test_a_rank_that_does_not_exist_breaks_the_protocol() -> None:
    """Whatever it says, and whoever speaks of it."""
    coordinator = with_ranks(2)
    for call in (
        lambda: coordinator.take_ready(2, 0),
        lambda: coordinator.take_outputs(load(2)),
        lambda: coordinator.take_dead(EngineDead("ENGINE_CORE_DEAD", 2, 0, "cause")),
        lambda: coordinator.take_first_request(FirstRequest(2, 0)),
    ):
        with pytest.raises(WireError, match="unknown engine 2"):
            call()


# ------------------------------------------------------------------------------------------ waves


def test_a_rank_that_starts_a_wave_brings_the_others_along() -> None:
    """All but itself; a second one that has started the same wave changes nothing."""
    coordinator = with_ranks()
    starts = coordinator.take_outputs(load(1, start_wave=0))
    assert starts == [Start(0, 0, StartWave(0, 1)), Start(2, 0, StartWave(0, 1))]
    assert coordinator.take_outputs(load(2, start_wave=0)) == []


def test_a_first_request_wakes_every_rank() -> None:
    """Also the one that got it: if it refuses the request, it knows nothing, and the others would
    wait for it."""
    coordinator = with_ranks()
    assert woken(coordinator.take_first_request(FirstRequest(1, 0))) == [0, 1, 2]
    assert coordinator.take_first_request(FirstRequest(2, 0)) == []


def test_what_is_said_of_earlier_waves_starts_nothing() -> None:
    """A request that was sent in an earlier wave is its rank's matter; that has announced it."""
    coordinator = with_ranks()
    coordinator.take_outputs(load(0, start_wave=4))
    coordinator.take_outputs(load(0, wave_complete=4))

    assert coordinator.take_first_request(FirstRequest(1, 4)) == []
    assert coordinator.take_outputs(load(1, start_wave=4)) == []
    assert coordinator.take_outputs(load(1, wave_complete=4)) == []
    assert (coordinator.wave, coordinator.is_running) == (5, False)


def test_a_rank_may_be_ahead_of_what_the_coordinator_knows() -> None:
    """The end of the last wave is still on its way, on another link."""
    coordinator = with_ranks()
    coordinator.take_outputs(load(0, start_wave=0))
    assert coordinator.take_outputs(load(1, start_wave=1)) != []
    coordinator.take_outputs(load(0, wave_complete=0))
    assert (coordinator.wave, coordinator.is_running) == (1, True)


def test_a_rank_that_is_late_joins_the_wave_under_way() -> None:
    """At the start of a server, ranks become ready one after the other."""
    coordinator = Coordinator(2)
    coordinator.take_ready(0, 0)
    assert coordinator.take_outputs(load(0, start_wave=0)) == []
    assert woken(coordinator.take_ready(1, 0)) == [0, 1]


def test_a_rank_that_comes_back_is_woken_with_all_others() -> None:
    """It is not known what it has missed: the wave runs once more, and the next one too."""
    coordinator = with_ranks(2)
    coordinator.take_outputs(load(0, start_wave=7))
    coordinator.take_outputs(load(0, wave_complete=7))

    assert coordinator.take_ready(1, 1) == [
        Start(0, 0, StartWave(8)),
        Start(1, 1, StartWave(8)),
    ]
    assert woken(coordinator.take_outputs(load(0, wave_complete=8))) == [0, 1]
    assert coordinator.take_outputs(load(0, wave_complete=9)) == []


def test_a_rank_that_joins_a_wave_which_is_over_does_not_wait_for_ever() -> None:
    """The others have paused, but word of it is still on its way: what the newcomer is told to run
    is over. Without one more wave it would wait for the others until a request comes."""
    world = World(num_ranks=3, num_api_servers=1)
    world.come_to_rest()
    world.request(api_server=0, rank=0, steps=1)
    while any(rank.waves.current_wave == 0 for rank in world.ranks):
        for link in world.links():
            if link not in [rank.to_coordinator for rank in world.ranks]:
                link.popleft()()
        for rank in world.ranks:
            if rank.can_step():
                rank.step()
    world.restart(2, has_last_words=False)
    world.ranks[2].ready.popleft()()
    world.come_to_rest()

    assert [rank.waves.is_running for rank in world.ranks] == [False] * 3


# ----------------------------------------------------------------------- everybody, in any order


def picks(most: int) -> st.SearchStrategy[list[int]]:
    """Which of those that can go on do so, one after the other."""
    return st.lists(st.integers(0, 11), min_size=min(most, 2), max_size=most)


class AnyOrder(RuleBasedStateMachine):
    """Requests never stay on paused ranks, and without requests everything comes to rest."""

    @initialize(
        num_ranks=st.integers(2, 4), num_api_servers=st.integers(1, 2), is_started=st.booleans()
    )
    def start(self, num_ranks: int, num_api_servers: int, is_started: bool) -> None:
        self.world = World(num_ranks, num_api_servers)
        if is_started:
            self.world.come_to_rest()  # all ranks are ready
        self.num_joins = 0 if is_started else num_ranks
        self.wave = 0
        self.waves: dict[tuple[int, int], int] = {}
        self.reported = [0] * num_api_servers

    @rule(picks=picks(2), steps=st.integers(1, 3), is_refused=st.sampled_from([False] * 4 + [True]))
    def request(self, picks: list[int], steps: int, is_refused: bool) -> None:
        api_server, rank = picks
        world = self.world
        world.request(
            api_server % len(world.api_servers), rank % len(world.ranks), steps, is_refused
        )

    @precondition(lambda self: self.world.links())
    @rule(picks=picks(6))
    def arrive(self, picks: list[int]) -> None:
        for pick in picks:
            if links := self.world.links():
                links[pick % len(links)].popleft()()

    @precondition(lambda self: any(rank.can_step() for rank in self.world.ranks))
    @rule(picks=picks(8))
    def step(self, picks: list[int]) -> None:
        for pick in picks:
            if able := [rank for rank in self.world.ranks if rank.can_step()]:
                able[pick % len(able)].step()

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.1, 1.0]))
    def publish(self, seconds: float) -> None:
        self.world.publish(seconds)

    @precondition(lambda self: self.num_joins < 8)
    @rule(indices=picks(2), has_last_words=st.booleans())
    def restart(self, indices: list[int], has_last_words: bool) -> None:
        for index in {index % len(self.world.ranks) for index in indices}:
            self.num_joins += 1
            self.world.restart(index, has_last_words)

    @rule()
    def come_to_rest(self) -> None:
        world = self.world
        world.come_to_rest()
        world.publish(1.0)
        world.come_to_rest()

        assert all(request.is_done for request in world.sent)
        assert not any(rank.waves.is_running for rank in world.ranks)
        assert not world.coordinator.is_running
        assert len({rank.waves.current_wave for rank in world.ranks}) == 1
        for api_server in world.api_servers:
            assert not api_server.report.is_running
            assert api_server.report.wave == world.coordinator.wave
            for told, rank in zip(api_server.report.loads, world.ranks, strict=False):
                assert told.num_running == 0 or told.epoch < rank.epoch
        # A request may start two: its API server's word may come so early that the wave is over
        # before the request is there. A rank that joins starts two as well.
        assert world.coordinator.wave <= 2 * (len(world.sent) + self.num_joins)
        if world.coordinator.wave > 0:
            assert world.ranks[0].waves.current_wave == world.coordinator.wave

    @invariant()
    def waves_only_grow(self) -> None:
        world = self.world
        assert world.coordinator.wave >= self.wave
        self.wave = world.coordinator.wave
        for rank in world.ranks:
            key = (rank.index, rank.epoch)
            assert rank.waves.current_wave >= self.waves.get(key, 0)
            self.waves[key] = rank.waves.current_wave
        for index, api_server in enumerate(world.api_servers):
            assert api_server.report.wave >= self.reported[index]
            self.reported[index] = api_server.report.wave

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.come_to_rest()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
