"""A drain that ends before Ray ends the job."""

import pytest

from cluster import environment
from cluster.environment import RAY_JOB_VARIABLE, Environment
from cluster.ray_job import drain_s, stop_advice


def in_job(**variables: str) -> Environment:
    return environment.read({RAY_JOB_VARIABLE: "{}", **variables})


def test_a_job_without_the_variable_drains_for_two_seconds_and_says_so() -> None:
    """Ray kills after three."""
    assert drain_s(20, in_job()) == 2
    assert "RAY_JOB_STOP_WAIT_TIME_S" in str(stop_advice(20, in_job()))


@pytest.mark.parametrize(
    ("wait", "drain"), [("60", 20), ("25", 20), ("20", 15), ("6", 4), ("1", 0)]
)
def test_a_job_keeps_some_of_its_wait_for_the_engine_cores(wait: str, drain: float) -> None:
    """A third of it, from one to five seconds; the rest is for requests."""
    variables = in_job(RAY_JOB_STOP_WAIT_TIME_S=wait)

    assert drain_s(20, variables) == drain
    assert (stop_advice(20, variables) is None) == (drain == 20)


def test_elsewhere_the_flag_alone_counts() -> None:
    """The variable may be set in a shell for other purposes."""
    variables = environment.read({"RAY_JOB_STOP_WAIT_TIME_S": "1"})

    assert drain_s(20, variables) == 20
    assert stop_advice(20, variables) is None
