"""One picture out of the metrics of several API servers. Pure.

They share a port, so a scrape reaches any one of them, and each knows a part. By rule:

    sum      what an API server counts itself: requests, tokens, times
    max      what an engine core counts: all are told, some later than others
    latest   an engine core's load: whoever was told last knows
    each     an API server's own process: kept apart by the label `api_server`

Sums and maxima of counters that only grow only grow, as long as no part is replaced by an older
one. The order of the parts does not matter, to the last bit. Used by `cluster.metrics_hub`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import assert_never

from msgspec.structs import replace

from api.metric_families import Family, Series

API_SERVER = "api_server"
"""Label: the number in the process's title."""


def merge(parts: Mapping[int, Sequence[Family]]) -> list[Family]:
    """The metrics of all API servers as one.

    Args:
        parts: by API server. Some may lack families, or series of them.
    """
    by_name: dict[str, dict[int, Family]] = {}
    for index, families in sorted(parts.items()):
        for family in families:
            by_name.setdefault(family.name, {})[index] = family
    return [_merge_family(same) for same in by_name.values()]


def age_family(ages_s: Mapping[int, float]) -> Family:
    """How old each part is: an API server that hangs counts with what it said last."""
    return Family(
        "raywire:api_server_metrics_age_seconds",
        "gauge",
        "Since an API server told what it contributes to these metrics",
        "each",
        (API_SERVER,),
        [Series((str(index),), [age_s]) for index, age_s in sorted(ages_s.items())],
    )


def _merge_family(same: Mapping[int, Family]) -> Family:
    first, *_ = same.values()
    label_names = next((f.label_names for f in same.values() if f.series), ())
    match first.rule:
        case "sum":
            series = _combine(same.values(), _sum)
        case "max":
            series = _combine(same.values(), _max)
        case "latest":
            series = _combine(same.values(), _latest)
        case "each":
            label_names = (*label_names, API_SERVER)
            series = [
                replace(each, labels=(*each.labels, str(index)))
                for index, family in same.items()
                for each in family.series
            ]
        case _:
            assert_never(first.rule)
    return replace(first, label_names=label_names, series=series)


def _combine(
    families: Iterable[Family], combine: Callable[[Sequence[Series]], Series]
) -> list[Series]:
    by_labels: dict[tuple[str, ...], list[Series]] = {}
    for family in families:
        for series in family.series:
            by_labels.setdefault(series.labels, []).append(series)
    return [combine(same) for same in by_labels.values()]


def _sum(same: Sequence[Series]) -> Series:
    # fsum rounds once, so that the order of the parts cannot be seen in the last digit.
    columns = zip(*(series.values for series in same), strict=True)
    return Series(same[0].labels, [math.fsum(column) for column in columns])


def _max(same: Sequence[Series]) -> Series:
    columns = zip(*(series.values for series in same), strict=True)
    return Series(same[0].labels, [max(column) for column in columns])


def _latest(same: Sequence[Series]) -> Series:
    return max(same, key=lambda series: (series.stamp, series.values))
