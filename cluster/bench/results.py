"""Figures with their percentiles and their spread, as a table for people and JSON for machines."""

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cluster.bench import machine
from cluster.bench.machine import Load
from cluster.bench.percentile import percentile
from cluster.text_table import aligned
from engine import __version__

SCHEMA = 1
"""Version of the JSON. Readers may rely on what is there; more may be added."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: what was measured in each repeat."""

    name: str
    unit: str
    repeats: Sequence[Sequence[float]]
    """Samples by repeat; one where a repeat gives one figure."""

    @property
    def samples(self) -> list[float]:
        return [sample for repeat in self.repeats for sample in repeat]

    @property
    def has_percentiles(self) -> bool:
        """False where a percentile would be no more than one repeat's figure."""
        return any(len(repeat) > 1 for repeat in self.repeats)

    @property
    def spread(self) -> float | None:
        """How far the repeats' medians lie apart, as a share of the median of them; None where
        there is nothing to compare."""
        medians = [statistics.median(repeat) for repeat in self.repeats if repeat]
        if len(medians) < 2 or not (middle := statistics.median(medians)):
            return None
        return (max(medians) - min(medians)) / middle

    def to_json(self, percentiles: Sequence[float]) -> dict[str, Any]:
        def summary(samples: Sequence[float]) -> dict[str, float]:
            return {f"p{p:g}": percentile(samples, p) for p in percentiles}

        return {
            "name": self.name,
            "unit": self.unit,
            "count": len(self.samples),
            "mean": statistics.fmean(self.samples),
            "min": min(self.samples),
            "max": max(self.samples),
            **summary(self.samples),
            "spread": self.spread,
            "repeats": [summary(repeat) for repeat in self.repeats if repeat],
        }


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go: the flags that all commands share."""

    json_file: str | None = None
    """`-` is standard output, in place of the table."""
    is_saved: bool = False
    """Into a file with the time in its name."""
    percentiles: Sequence[float] = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True)
class Results:
    """What one command has measured."""

    command: str
    settings: Mapping[str, Any]
    figures: Sequence[Measured]
    load: Load
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of what is counted over all repeats, such as errors."""
    notes: Sequence[str] = ()

    @property
    def shown(self) -> list[Measured]:
        """Nothing is said of what has no samples."""
        return [figure for figure in self.figures if figure.samples]

    def to_json(self, percentiles: Sequence[float]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "command": self.command,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "raywire": __version__,
            "machine": machine.describe(),
            "settings": dict(self.settings),
            "load": {"others": self.load.others, "is_spoiled": self.load.is_spoiled},
            "counts": dict(self.counts),
            "figures": [figure.to_json(percentiles) for figure in self.shown],
            "notes": list(self.notes),
        }

    def text(self, percentiles: Sequence[float]) -> str:
        mark = "*" if self.load.is_spoiled else ""
        rows = [["", "", *(f"p{p:g}" for p in percentiles), "spread"]]
        rows += [_row(figure, percentiles, mark) for figure in self.shown]
        rows += [
            [name, "", str(count), *([""] * len(percentiles))]
            for name, count in self.counts.items()
        ]
        return "\n".join([*aligned(rows, left=(0, 1)), "", *self.notes, self._load()])

    def _load(self) -> str:
        said = f"others had {self.load.others:.0%} of this machine's cores"
        if self.load.is_spoiled:
            return f"* {said}: measured under load, so measure again"
        return said


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def emit(results: Results, output: Output) -> None:
    """Show the table, and write the JSON where it is wanted."""
    content = json.dumps(results.to_json(output.percentiles), indent=2)
    if output.json_file == "-":
        click.echo(content)
    else:
        click.echo(results.text(output.percentiles))
        if output.json_file is not None:
            _write(Path(output.json_file), content)
    if output.is_saved:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        _write(Path(f"raywire-bench-{results.command}-{now}.json"), content)


def _write(file: Path, content: str) -> None:
    file.write_text(content + "\n", encoding="utf-8")
    click.echo(f"written to {file}", err=True)


def _row(figure: Measured, percentiles: Sequence[float], mark: str) -> list[str]:
    if figure.has_percentiles:
        cells = [number(percentile(figure.samples, p)) + mark for p in percentiles]
    else:
        middle = number(statistics.median(figure.samples)) + mark
        cells = [middle, *([""] * (len(percentiles) - 1))]
    spread = "" if figure.spread is None else f"{figure.spread:.0%}"
    return [figure.name, figure.unit, *cells, spread]
