"""What has been measured, and the file that keeps it: docs/performance.json.

A figure has one sample a turn of ours, and of the peer's where there is one. Each belongs to a run,
which says when, where and by which command. Measuring one section again replaces its figures and
leaves the others, so the table in the document may be of several runs, and says so.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from cluster.bench import machine
from cluster.bench.machine import BUSY_SHARE, Load, Tree
from tests.bench.limits import Limit

Side = Literal["ours", "theirs"]

_ROW_BUDGET_S = 45.0
_MIN_TURNS = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Where figures come from."""

    date: str
    command: str
    machine: str
    raywire: str
    """Its commit."""
    vllm: str = ""
    """Its version, where it was measured."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table."""

    ours: list[float]
    theirs: list[float] = field(default_factory=list)
    """Of the same turns, where both have as many."""
    others: float = 0.0
    """Share of the cores that everybody else had meanwhile."""
    limit: Limit | None = None
    run: Run | None = None

    @property
    def is_spoiled(self) -> bool:
        return self.others > BUSY_SHARE

    def ratios(self, is_rate: bool) -> list[float]:
        """How many times as good ours is, by turn: as fast, as little. Empty without a peer."""
        ours, theirs = self.ours, self.theirs
        if ours and theirs and len(ours) != len(theirs):
            ours, theirs = [statistics.median(ours)], [statistics.median(theirs)]
        pairs = zip(ours, theirs, strict=False) if is_rate else zip(theirs, ours, strict=False)
        return [good / bad for good, bad in pairs if bad > 0]


@dataclass(frozen=True, slots=True)
class Curve:
    """What something costs as work grows."""

    title: str
    """What is measured, and in which unit."""
    values: list[float]
    """At each place of its axis."""
    allowed: float = 1.0
    """The exponent that it may have: 0 is flat, 1 linear."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows, and all curves over it."""

    title: str
    places: list[int]
    curves: list[Curve]
    others: float = 0.0
    run: Run | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """The content of the file."""

    figures: dict[str, Figure] = field(default_factory=dict)
    """By the key of `rows.ROWS`."""
    axes: dict[str, Axis] = field(default_factory=dict)

    def updated(self, figures: Mapping[str, Figure], axes: Mapping[str, Axis]) -> "Store":
        return Store({**self.figures, **figures}, {**self.axes, **axes})


def read_store(file: Path) -> Store:
    """Empty where there is no file."""
    if not file.exists():
        return Store()
    return msgspec.json.decode(file.read_bytes(), type=Store)


def write_store(file: Path, store: Store) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(store), indent=1) + b"\n")


def turns(repeats: int) -> Iterator[int]:
    """Numbers of the turns of a row: as many as asked, but no more than two once they have taken
    long, so that one slow row does not hold up all others."""
    began = time.monotonic()
    for number in range(repeats):
        if number >= _MIN_TURNS and time.monotonic() - began > _ROW_BUDGET_S:
            return
        yield number


class Recorder:
    """Collects samples in turns, and what others did meanwhile."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[Side, list[float]]] = {}
        self._loads: dict[str, list[Load]] = {}
        self._limits: dict[str, Limit] = {}

    @contextmanager
    def turn(self, side: Side, *bystanders: Tree) -> Iterator[dict[str, float]]:
        """Yields a dict to put samples into, by key. Whose turn it is not are `bystanders`: what
        they do counts as others."""
        found: dict[str, float] = {}
        with machine.watch(*bystanders) as load:
            yield found
        self.add(side, found, load)

    def add(self, side: Side, found: Mapping[str, float], load: Load) -> None:
        for key, value in found.items():
            samples: dict[Side, list[float]] = self._samples.setdefault(
                key, {"ours": [], "theirs": []}
            )
            samples[side].append(value)
            self._loads.setdefault(key, []).append(load)

    def limit(self, key: str, limit: Limit) -> None:
        self._limits[key] = limit

    def figures(self) -> dict[str, Figure]:
        return {
            key: Figure(
                ours=[_short(value) for value in samples["ours"]],
                theirs=[_short(value) for value in samples["theirs"]],
                others=_short(_mean_others(self._loads[key])),
                limit=self._limits.get(key),
            )
            for key, samples in self._samples.items()
        }


def _mean_others(loads: list[Load]) -> float:
    wall_s = sum(load.wall_s for load in loads)
    return sum(load.others * load.wall_s for load in loads) / max(wall_s, 1e-9)


def _short(value: float) -> float:
    """Five digits that count: what lies in a file that people compare."""
    return float(f"{value:.5g}")
