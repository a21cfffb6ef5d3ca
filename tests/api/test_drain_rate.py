"""When those who are turned away should come back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.drain_rate import MAX_RETRY_AFTER_S, UNKNOWN_RETRY_AFTER_S, DrainRate, Line

gaps = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=50)
amounts = st.floats(0.5, 1000.0)
rates = st.floats(0.001, 10_000.0)


def known(rate: DrainRate, now: float) -> float:
    per_s = rate.per_s(now)
    assert per_s is not None
    return per_s


@given(gap_s=st.floats(0.01, 100.0), count=st.integers(1, 200))
def test_an_even_pace_is_its_own_rate(gap_s: float, count: int) -> None:
    """From the first that leaves on, however long it goes on."""
    rate = DrainRate()
    rate.begin(5.0)
    for number in range(1, count + 1):
        rate.add(5.0 + number * gap_s)

    now = 5.0 + count * gap_s
    # What has just left counts in full, and what came before it a bit less.
    assert known(rate, now) == pytest.approx(1 / gap_s, rel=gap_s / 20 + 0.01)


@given(gaps=gaps, amount=amounts)
def test_a_rate_is_between_the_slowest_and_the_quickest(gaps: list[float], amount: float) -> None:
    """Whatever came when; a decayed average can be no more than what it is made of."""
    rate, now = DrainRate(), 0.0
    rate.begin(0.0)
    for gap_s in gaps:
        now += gap_s
        rate.add(now, amount)
        assert known(rate, now) > 0
    weight = 20.0 * (1 - math.exp(-min(gaps) / 20.0))
    assert known(rate, now) <= amount / weight * (1 + 1e-9)


@given(gaps=gaps, idle_s=st.floats(0.0, 1e6))
def test_idle_time_does_not_count(gaps: list[float], idle_s: float) -> None:
    """A night without requests does not make a server slow."""
    rate, now = DrainRate(), 0.0
    for gap_s in gaps:
        now += gap_s
        rate.add(now)
    before = known(rate, now)

    rate.begin(now + idle_s)

    assert known(rate, now + idle_s) == pytest.approx(before)


def test_what_has_stopped_gets_slower() -> None:
    """Work that does not end says so: nothing has left, and time passes."""
    rate = DrainRate()
    rate.add(1.0)
    assert known(rate, 1.0) > known(rate, 10.0) > known(rate, 100.0) > 0
    assert DrainRate().per_s(5.0) is None


@given(per_s=rates, wants=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), min_size=1))
def test_everybody_gets_a_time_that_clients_heed(
    per_s: float, wants: list[tuple[float, int]]
) -> None:
    """Whole seconds from 1 to 60, whenever they come."""
    line, now = Line(), 0.0
    for gap_s, amount in wants:
        now += gap_s
        assert 1 <= line.join(now, amount, per_s) <= MAX_RETRY_AFTER_S


@given(per_s=rates, count=st.integers(1, 300))
def test_those_who_come_at_once_are_spread_at_the_rate(per_s: float, count: int) -> None:
    """Nobody before one who came earlier, and no more in any second than leave in it."""
    line = Line()
    times = [line.join(0.0, 1, per_s) for _ in range(count)]

    assert times == sorted(times)
    inside = [each for each in times if each < MAX_RETRY_AFTER_S]
    for second in set(inside):
        assert inside.count(second) <= math.ceil(per_s) + 1


@given(per_s=rates, count=st.integers(1, 100))
def test_a_line_is_over_when_its_time_is(per_s: float, count: int) -> None:
    """Who comes then is the first again."""
    line = Line()
    last = max(line.join(0.0, 1, per_s) for _ in range(count))

    assert line.join(float(last), 1, per_s) == Line().join(0.0, 1, per_s)


@given(
    per_s=rates,
    excess=st.floats(1, 10_000),
    wants=st.lists(st.tuples(st.floats(0, 30), amounts), min_size=1),
)
def test_nobody_comes_back_before_what_is_too_much_is_gone(
    per_s: float, excess: float, wants: list[tuple[float, float]]
) -> None:
    """Nor before what those in front of him bring, within the times that clients heed."""
    line, now, earliest = Line(), 0.0, 0.0
    for gap_s, amount in wants:
        now += gap_s
        wait_s = line.join_behind(now, excess, amount, per_s)
        assert 1 <= wait_s <= MAX_RETRY_AFTER_S
        due = min(max(earliest, now + excess / per_s), now + MAX_RETRY_AFTER_S)
        assert now + wait_s >= due - 1e-6
        earliest = min(due + amount / per_s, now + MAX_RETRY_AFTER_S)


def test_without_a_rate_there_is_a_guess() -> None:
    """Nothing has ended so far."""
    assert Line().join(0.0, 1, None) == UNKNOWN_RETRY_AFTER_S
