"""A plan of faults is decided by its seed, and nothing else."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.chaos import KINDS
from cluster.chaos.plan import make_plan
from engine.errors import ConfigError


@given(st.integers(), st.floats(10, 5000), st.floats(1, 60), st.integers(1, len(KINDS)))
def test_one_fault_an_interval_and_all_kinds_equally_often(
    seed: int, duration_s: float, interval_s: float, num_kinds: int
) -> None:
    """Never two within half an interval, and the same again from the same seed."""
    kinds = KINDS[:num_kinds]
    interval_s = min(interval_s, duration_s)
    plan = make_plan(seed, duration_s, interval_s, kinds)

    assert plan == make_plan(seed, duration_s, interval_s, kinds)
    assert len(plan) == int(duration_s / interval_s)
    times = [0.0, *(fault.at_s for fault in plan), duration_s]
    assert all(0 <= fault.draw < 1 for fault in plan)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps[1:-1], default=interval_s) >= interval_s / 2 - 1e-6
    assert min(gaps[0], gaps[-1]) >= interval_s / 4 - 1e-6
    counts = [sum(fault.kind == kind for fault in plan) for kind in kinds]
    assert max(counts) - min(counts) <= 1


def test_another_seed_is_another_plan() -> None:
    """Other kinds at other times."""
    assert make_plan(1, 600, 60, KINDS) != make_plan(2, 600, 60, KINDS)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 61.0])
def test_a_plan_without_a_fault_is_refused(interval_s: float) -> None:
    """Nobody should believe that something was tried."""
    with pytest.raises(ConfigError, match="no interval"):
        make_plan(1, 60, interval_s, KINDS)
    with pytest.raises(ConfigError, match="no kinds"):
        make_plan(1, 60, 60, [])
