"""Which rank gets the next request."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.load_balancer import HOME_TOKENS, LoadBalancer, Route
from engine.codec import Array
from engine.errors import InvalidRequestError, UnavailableError
from engine.wire import EngineLoad, SchedulerStats

BLOCK = 16


def make_balancer(
    num_ranks: int = 3, client_index: int = 0, *, has_prefix_cache: bool = True
) -> LoadBalancer:
    balancer = LoadBalancer(num_ranks, client_index)
    for rank in range(num_ranks):
        balancer.mark_up(rank, BLOCK, 100_000 if has_prefix_cache else 0)
    return balancer


def prompt(seed: int, num_tokens: int = 640) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 17, num_tokens).astype("<u4")


def report(num_by_client: list[int], num_waiting: int = 0, usage: float = 0.0) -> SchedulerStats:
    return SchedulerStats(
        num_waiting, sum(num_by_client) - num_waiting, usage, num_by_client=num_by_client
    )


def choose(balancer: LoadBalancer, tokens: Array | None = None, **options: Any) -> Route:
    return balancer.choose(tokens, **options)


# --------------------------------------------------------------------------------------- load


def test_burst_is_spread_evenly() -> None:
    """What was sent counts at once, without any report."""
    balancer = make_balancer()

    assert sorted(choose(balancer).rank for _ in range(9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_least_busy_rank_is_chosen() -> None:
    """By own requests and those of others; waiting ones count more than running ones."""
    balancer = make_balancer()
    balancer.take_report(0, report([0, 4]))
    balancer.take_report(1, report([0, 3], num_waiting=2))
    balancer.take_report(2, report([0, 5]))

    route = choose(balancer)

    assert (route.rank, route.num_queued, route.rule) == (0, 4, "load")


def test_waiting_weighs_more_the_fuller_the_cache() -> None:
    """Who waits for room waits longer than who waits for the next step."""
    balancer = make_balancer(2)
    balancer.take_report(0, report([0, 10], num_waiting=2, usage=0.3))
    balancer.take_report(1, report([0, 2], num_waiting=2, usage=0.99))

    assert choose(balancer).rank == 0


def test_report_neither_hides_nor_doubles_our_own_requests() -> None:
    """Before it has seen them, when it has seen them, and when they have ended since."""
    balancer = make_balancer(2)
    for _ in range(4):
        choose(balancer, pinned_rank=0)

    balancer.take_report(0, report([0, 3]))
    assert balancer.loads[0].num_in_flight(0) == 4 + 3
    balancer.take_report(0, report([4, 3]))
    assert balancer.loads[0].num_in_flight(0) == 4 + 3
    for _ in range(4):
        balancer.finish(0)
    assert balancer.loads[0].num_in_flight(0) == 3


def test_coordinator_and_rank_are_understood_alike() -> None:
    """The same numbers come by two ways."""
    direct, relayed = make_balancer(2), make_balancer(2)

    direct.take_report(1, report([1, 2], num_waiting=1))
    relayed.take_report(1, EngineLoad(1, 0, 1, 2, 0.0, [1, 2]))

    assert direct.loads == relayed.loads


def test_rank_that_is_down_is_never_chosen() -> None:
    """However little it has to do; and with none up there is no choice."""
    balancer = make_balancer(2)
    choose(balancer, pinned_rank=0)
    balancer.mark_down(1)

    assert (choose(balancer).rank, choose(balancer).rule) == (0, "only")
    balancer.mark_down(0)
    with pytest.raises(UnavailableError):
        choose(balancer)


def test_rank_that_comes_back_starts_afresh() -> None:
    """Nothing in flight but our own, nothing in its cache."""
    balancer = make_balancer(2)
    choose(balancer, prompt(0), pinned_rank=1)
    balancer.take_report(1, report([1, 50], num_waiting=20))
    balancer.mark_down(1)

    balancer.mark_up(1, BLOCK, 100_000)
    balancer.finish(1)

    route = choose(balancer, prompt(0), pinned_rank=1)
    assert (route.num_queued, route.matched_blocks) == (0, 0)


# ------------------------------------------------------------------------------ pinned, sessions


def test_pinned_rank_is_taken_however_busy() -> None:
    """Whoever asks for one rank gets that or an error."""
    balancer = make_balancer()
    balancer.take_report(2, report([0, 500], num_waiting=400, usage=1.0))

    assert (choose(balancer, pinned_rank=2).rank, choose(balancer, pinned_rank=2).rule) == (
        2,
        "pinned",
    )
    balancer.mark_down(1)
    with pytest.raises(UnavailableError, match="asked for is not up"):
        choose(balancer, pinned_rank=1)
    with pytest.raises(InvalidRequestError, match="from 0 to 2, not 3"):
        choose(balancer, pinned_rank=3)


def test_session_breaks_ties() -> None:
    """A rank that is no busier than others keeps its sessions; one that is does not."""
    balancer = make_balancer()
    first = choose(balancer, session="s").rank
    balancer.finish(first)
    for _ in range(3):
        again = choose(balancer, session="s")
        assert (again.rank, again.rule) == (first, "session")
        balancer.finish(first)

    balancer.take_report(first, report([0, 2]))

    assert choose(balancer, session="s").rank != first


def test_session_begins_at_the_same_rank_everywhere() -> None:
    """Its requests come to any of several API servers; sessions are spread all the same."""
    begins = [
        [choose(make_balancer(4, index), session=f"s{i}").rank for i in range(40)]
        for index in range(3)
    ]

    assert begins[0] == begins[1] == begins[2]
    assert set(begins[0]) == {0, 1, 2, 3}


# ------------------------------------------------------------------------------------ prefixes


def test_prompt_goes_where_its_prefix_is() -> None:
    """Rather than to an idle rank; the answer says how much is there."""
    balancer = make_balancer()
    first = choose(balancer, prompt(0))
    assert (first.rule, first.matched_blocks) == ("load", 0)

    again = choose(balancer, prompt(0))

    assert (again.rank, again.rule, again.num_queued) == (first.rank, "prefix", 1)
    # Of 640 tokens the last is always computed, so of 40 blocks 39 can be found.
    assert again.matched_blocks == 39


def test_long_prompts_that_begin_alike_begin_at_one_rank_everywhere() -> None:
    """API servers do not know each other's prompts; idle ranks get them by what they begin with."""
    homes: list[int] = []
    for seed in range(40):
        begin = prompt(seed, HOME_TOKENS)
        ranks = {
            choose(
                make_balancer(client_index=index), np.concatenate([begin, prompt(index, 50)])
            ).rank
            for index in range(4)
        }
        assert len(ranks) == 1
        homes.extend(ranks)
    assert min(homes.count(rank) for rank in range(3)) > 4


def test_busy_rank_is_not_worth_a_short_prefix() -> None:
    """640 tokens are worth five requests in flight, not six."""
    balancer = make_balancer(2)
    rank = choose(balancer, prompt(0)).rank
    other = 1 - rank
    balancer.take_report(rank, report([0, 3]))
    assert choose(balancer, prompt(0)).rank == rank

    balancer.take_report(rank, report([0, 6]))

    moved = choose(balancer, prompt(0))
    assert (moved.rank, moved.rule) == (other, "load")
    # From now on both have it, and neither is preferred for it.
    balancer.take_report(rank, report([0, 0]))
    assert choose(balancer, prompt(0)).rule == "load"


def test_longest_prefix_wins_among_equals() -> None:
    """Each rank counts with what it has itself."""
    balancer = make_balancer()
    choose(balancer, prompt(0)[:320], pinned_rank=0)
    choose(balancer, prompt(0), pinned_rank=1)
    choose(balancer, prompt(1), pinned_rank=2)

    route = choose(balancer, prompt(0))

    assert (route.rank, route.rule) == (1, "prefix")


def test_other_salt_is_another_prompt() -> None:
    """What one tenant has sent draws nobody else."""
    balancer = make_balancer()
    choose(balancer, prompt(0), salt=("a", None))

    assert choose(balancer, prompt(0), salt=("b", None)).rule == "load"
    assert choose(balancer, prompt(0), salt=("a", "adapter")).rule == "load"


def test_without_a_prefix_cache_prefixes_count_for_nothing() -> None:
    """No engine core would find them."""
    balancer = make_balancer(has_prefix_cache=False)

    assert {choose(balancer, prompt(0)).rule for _ in range(6)} == {"load"}


def test_reset_prefix_cache_ends_the_preference() -> None:
    """Nothing is there any more."""
    balancer = make_balancer()
    rank = choose(balancer, prompt(0)).rank

    balancer.forget_prefixes(rank)

    assert choose(balancer, prompt(0)).rule == "load"


def test_wrong_guess_makes_old_claims_void() -> None:
    """The first output of a request says what was found; of two ranks only the guilty one loses."""
    balancer = make_balancer()
    for seed, rank in ((0, 0), (1, 0), (2, 1)):
        choose(balancer, prompt(seed), pinned_rank=rank)
        # Some more has been written since, so these are no requests of a moment ago.
        stats = SchedulerStats(0, 0, 0.0, num_generation_tokens=(seed + 1) * 25_000)
        balancer.take_counters(rank, stats)

    balancer.correct(choose(balancer, prompt(0)), num_cached_tokens=624)
    assert choose(balancer, prompt(1), pinned_rank=0).matched_blocks == 39
    balancer.correct(choose(balancer, prompt(2), pinned_rank=1), num_cached_tokens=0)
    assert choose(balancer, prompt(1), pinned_rank=0).matched_blocks == 39


# -------------------------------------------------------------------------- several API servers


class Simulation:
    """API servers that share ranks, with reports as old as they are in life. Counts time in steps;
    a report is made every `interval` steps and is `delay` steps on its way."""

    def __init__(self, num_servers: int, num_ranks: int, interval: int, delay: int) -> None:
        self.balancers = [make_balancer(num_ranks, index) for index in range(num_servers)]
        self.running = [[0] * num_servers for _ in range(num_ranks)]
        self._interval, self._delay = interval, delay
        self._reports: deque[tuple[int, list[SchedulerStats]]] = deque()
        self._ends: dict[int, list[tuple[int, int]]] = {}

    @property
    def imbalance(self) -> int:
        totals = [sum(counts) for counts in self.running]
        return max(totals) - min(totals)

    def send(self, server: int, ends_at: int) -> None:
        rank = choose(self.balancers[server]).rank
        self.running[rank][server] += 1
        self._ends.setdefault(ends_at, []).append((rank, server))

    def step(self, now: int) -> None:
        for rank, server in self._ends.pop(now, ()):
            self.running[rank][server] -= 1
            self.balancers[server].finish(rank)
        if now % self._interval == 0:
            reports = [report(list(counts)) for counts in self.running]
            self._reports.append((now + self._delay, reports))
        while self._reports and self._reports[0][0] <= now:
            for rank, stats in enumerate(self._reports.popleft()[1]):
                for balancer in self.balancers:
                    balancer.take_report(rank, stats)


def simulate(
    num_servers: int, num_ranks: int, interval: int, delay: int, seed: int
) -> Iterator[int]:
    """The imbalance over time, once there is steady work: requests come to all servers at random
    and last long, so that what went wrong stays wrong for long."""
    chance = random.Random(seed)
    simulation = Simulation(num_servers, num_ranks, interval, delay)
    for now in range(600):
        simulation.step(now)
        for _ in range(chance.randint(0, 2 * num_ranks)):
            simulation.send(chance.randrange(num_servers), now + chance.randint(50, 150))
        if now > 200:
            yield simulation.imbalance


@settings(max_examples=8)
@given(
    num_servers=st.sampled_from([1, 2, 4, 8]),
    num_ranks=st.sampled_from([2, 4, 16]),
    delay=st.integers(0, 10),
    seed=st.integers(0, 1000),
)
def test_servers_that_see_old_reports_do_not_herd(
    num_servers: int, num_ranks: int, delay: int, seed: int
) -> None:
    """With some 100 requests in flight on each rank, the busiest and the idlest stay a few requests
    of each server apart. Were the others' requests since the report ignored, it would be ten."""
    most = max(simulate(num_servers, num_ranks, 10, delay, seed))

    assert most <= 8 + 4 * num_servers


def test_servers_with_nothing_to_do_begin_with_different_ranks() -> None:
    """A first request to each of them meets no other."""
    assert {choose(make_balancer(4, index)).rank for index in range(4)} == {0, 1, 2, 3}


def test_sessions_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used is forgotten, and is a new one when it comes again."""
    monkeypatch.setattr("api.load_balancer.MAX_SESSIONS", 2)
    balancer, names = make_balancer(2), ("a", "b", "c")
    begins_at = {name: choose(make_balancer(2), session=name).rank for name in names}
    for name in names:
        balancer.finish(choose(balancer, session=name, pinned_rank=1 - begins_at[name]).rank)

    for name in ("b", "c"):
        assert choose(balancer, session=name).rank == 1 - begins_at[name]
        balancer.finish(1 - begins_at[name])
    assert choose(balancer, session="a").rank == begins_at["a"]
