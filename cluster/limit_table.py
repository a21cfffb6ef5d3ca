"""`raywire limits`: the bounds on what clients send, as people and machines read them. Pure."""

import dataclasses
from typing import Any

from api.limits import TABLE
from cluster.text_table import aligned
from engine.limits import Limit

_UNITS = {"bytes": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))}
_LARGE = 2**31 - 1
"""From here on a number is easier to read as a power of two."""


def render() -> str:
    """The table as text, under headings."""
    lines: list[str] = []
    for group, limits in TABLE.items():
        rows = [(each.name, bound(each), each.what, each.flag) for each in limits]
        lines += [f"{group}:", *(f"  {row}" for row in aligned(rows, left=range(4))), ""]
    return "\n".join(lines[:-1])


def to_json() -> list[dict[str, Any]]:
    """The same with numbers as they are."""
    return [
        {"group": group, **dataclasses.asdict(each)}
        for group, limits in TABLE.items()
        for each in limits
    ]


def bound(limit: Limit) -> str:
    """What passes, in words: `1 to 256 characters`, `64 KiB`."""
    most, unit = _shown(limit.most, limit.unit)
    words = most if limit.least is None else f"{_shown(limit.least, '')[0]} to {most}"
    return f"{words} {unit}".rstrip()


def _shown(value: float, unit: str) -> tuple[str, str]:
    for size, name in _UNITS.get(unit, ()):
        if value % size == 0:
            return f"{value / size:g}", name
    if abs(value) >= _LARGE:
        return _as_power(int(value)), unit
    return f"{value:,g}" if value % 1 else f"{int(value):,}", unit


def _as_power(value: int) -> str:
    """An integer next to a power of two, as `2^31 - 1`."""
    sign = "-" if value < 0 else ""
    size = abs(value)
    if size & (size - 1) == 0:
        return f"{sign}2^{size.bit_length() - 1}"
    return f"{sign}2^{size.bit_length()} {'+' if sign else '-'} 1"
