"""Percentiles of measured times."""

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], p: float) -> float:
    """The smallest sample that at least `p` per cent are no greater than: one that has been
    measured, nothing in between."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)]
