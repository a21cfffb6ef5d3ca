"""Which fault happens when: from a seed, so that a run can be repeated. Pure.

Used by `raywire chaos` and by the soak test.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from api.chaos import Kind
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """From the beginning of the run."""
    kind: Kind
    draw: float
    """Which of the processes there are then: see `api.chaos.choose`."""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind}  (draw {self.draw:.3f})"


def make_plan(
    seed: int, duration_s: float, interval_s: float, kinds: Sequence[Kind]
) -> list[Fault]:
    """One fault in each whole interval, at some moment of its middle half, so that none comes
    before half an interval has passed since the last. All kinds come equally often.

    Raises:
        ConfigError: there is no kind, or no whole interval.
    """
    if not kinds:
        raise ConfigError("no kinds of faults to choose from")
    if not 0 < interval_s <= duration_s:
        raise ConfigError(f"no interval of {interval_s:g} s in a run of {duration_s:g} s")
    draws, order = random.Random(f"faults {seed}"), _in_turn(seed, kinds)
    return [
        Fault((index + draws.uniform(0.25, 0.75)) * interval_s, next(order), draws.random())
        for index in range(int(duration_s / interval_s))
    ]


def _in_turn(seed: int, kinds: Sequence[Kind]) -> Iterator[Kind]:
    """All kinds in some order, then all of them in another one, and so on."""
    shuffler = random.Random(f"kinds {seed}")
    while True:
        yield from shuffler.sample(list(kinds), len(kinds))
