"""Few combinations that have every pair of two settings' values in them."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def all_pairs(factors: Mapping[str, Sequence[T]], seed: int = 0) -> list[dict[str, T]]:
    """Combinations such that any two values of any two factors are together in at least one.

    Greedy: each begins with a pair that is still missing, and takes the values that bring most
    others along. The same for the same seed.
    """
    draws = random.Random(seed)
    names = list(factors)
    missing = {
        frozenset([(a, i), (b, j)])
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while missing:
        first = min(missing, key=sorted)
        row = dict(first)
        for name in draws.sample([name for name in names if name not in row], len(names) - 2):
            levels = range(len(factors[name]))
            num_new = [_num_in(missing, (name, level), row) for level in levels]
            row[name] = max(levels, key=lambda level: (num_new[level], draws.random()))
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append({name: factors[name][row[name]] for name in names})
    return rows


def _num_in(
    missing: set[frozenset[tuple[str, int]]], value: tuple[str, int], row: Mapping[str, int]
) -> int:
    """How many missing pairs a value makes with those of a row."""
    return sum(frozenset([value, other]) in missing for other in row.items())
