"""Curves as tables, and the verdict: how the cost grows, as an exponent, and whether it may."""

import math
from collections.abc import Iterator, Mapping, Sequence

from cluster.bench.machine import BUSY_SHARE
from cluster.bench.results import number
from tests.bench.figures import Axis, Curve
from tests.bench.summary import table

BEGIN, END = "<!-- bench curves: begin -->", "<!-- bench curves: end -->"

TOLERANCE = 0.15
"""Of an exponent: what caches of the processor and noise make of a straight line."""


def curves(axes: Mapping[str, Axis]) -> str:
    """The part of the document between BEGIN and END."""
    lines = [line for axis in axes.values() for line in _axis(axis)]
    worse = [
        f"{curve.title} ({axis.title})"
        for axis in axes.values()
        for curve in axis.curves
        if not is_right(axis, curve)
    ]
    said = "; ".join(worse)
    verdict = f"**Grows faster than it should**: {said}." if worse else "All grow as they should."
    return "\n".join([BEGIN, *([verdict, ""] if axes else []), *lines, *_runs(axes), END, ""])


def exponent(places: Sequence[float], values: Sequence[float]) -> float:
    """How values grow at the far end: the slope of the last half of them, both logarithmic. A
    curve that is flat and then linear is linear."""
    num_last = max(2, math.ceil(len(places) / 2))
    x = [math.log(place) for place in places[-num_last:]]
    y = [math.log(max(value, 1e-9)) for value in values[-num_last:]]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - mean_x) ** 2 for a in x)


def is_right(axis: Axis, curve: Curve) -> bool:
    return exponent(axis.places, curve.values) <= curve.allowed + TOLERANCE


def _axis(axis: Axis) -> Iterator[str]:
    mark = "\\*" if axis.others > BUSY_SHARE else ""
    columns = [axis.title + mark, *(f"{place:,}" for place in axis.places), "grows", "should"]
    yield from table(
        columns,
        [
            [
                curve.title,
                *(number(value) for value in curve.values),
                _growth(axis, curve),
                "flat" if curve.allowed == 0 else "linear",
            ]
            for curve in axis.curves
        ],
    )


def _growth(axis: Axis, curve: Curve) -> str:
    """`n^0.98`, in bold where that is too much."""
    found = exponent(axis.places, curve.values)
    if not is_right(axis, curve):
        return f"**n^{found:.2f}**"
    return "flat" if abs(found) <= TOLERANCE else f"n^{found:.2f}"


def _runs(axes: Mapping[str, Axis]) -> Iterator[str]:
    for run in dict.fromkeys(axis.run for axis in axes.values() if axis.run is not None):
        names = ", ".join(axis.title for axis in axes.values() if axis.run == run)
        yield f"{run.date}, `{run.command}`; {run.machine}; raywire {run.raywire}: {names}."
    if any(axis.others > BUSY_SHARE for axis in axes.values()):
        yield "A \\* marks what was taken while others had over 5% of the cores."
    yield ""
