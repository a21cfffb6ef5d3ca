"""Of several signs of trouble, the one that began."""

import signal

import pytest

from workers import rpc
from workers.first_cause import choose


def failed(at_s: float) -> rpc.Failed:
    return rpc.Failed(0, "load", "other", "message", "traceback", at_s)


@pytest.mark.parametrize(
    ("deaths", "failures", "expected"),
    [
        ({1: 3}, {}, 1),
        ({}, {1: failed(1.0)}, 1),
        # Its own report explains a rank's end.
        ({1: 1}, {1: failed(1.0)}, 1),
        # The others' collectives fail when a rank is killed.
        ({1: -signal.SIGKILL}, {0: failed(1.0)}, 1),
        ({1: -signal.SIGSEGV, 0: 1}, {0: failed(1.0)}, 1),
        # A rank raises; another one's library aborts for want of it.
        ({1: -signal.SIGABRT, 0: 1}, {0: failed(1.0)}, 0),
        # Two raise: one because of the other.
        ({}, {0: failed(2.0), 1: failed(1.0)}, 1),
    ],
)
def test_first_cause(
    deaths: dict[int, int], failures: dict[int, rpc.Failed], expected: int
) -> None:
    """A kill or crash from outside explains the rest; else the earliest report; else an exit."""
    assert choose(deaths, failures) == expected
