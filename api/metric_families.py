"""Metrics as values: what a Prometheus registry says at one moment, and from there to text.

A `Family` can travel, be compared and be merged (`metrics_merge`). Prometheus's own samples repeat
name and labels for every bucket; this form is about a tenth of that.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, assert_never

import msgspec
import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]

MergeRule = Literal["sum", "max", "latest", "each"]
"""How the values of several API servers become one: see `metrics_merge`."""

_KINDS: dict[str, Kind] = {"counter": "counter", "gauge": "gauge", "histogram": "histogram"}


class Series(msgspec.Struct, frozen=True, array_like=True):
    """The values under one combination of labels."""

    labels: tuple[str, ...]
    """In the order of the family's label names."""
    values: list[float]
    """One; of a histogram, the count up to each bound and then the sum of what was observed."""
    stamp: float = 0.0
    """When it was set, by this machine's monotonic clock. Only with the rule `latest`."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """All series of one name."""

    name: str
    """Without `_total`, `_bucket` and the like."""
    kind: Kind
    documentation: str
    rule: MergeRule
    label_names: tuple[str, ...] = ()
    series: list[Series] = []
    bounds: list[str] = []
    """Of a histogram's buckets; the last is `+Inf`."""


def from_prometheus(metric: Metric, rule: MergeRule) -> Family:
    """One family of a registry: counter, gauge or histogram."""
    values: dict[tuple[str, ...], list[float]] = {}
    label_names: tuple[str, ...] = ()
    bounds: dict[str, None] = {}
    for sample in metric.samples:
        labels = dict(sample.labels)
        if metric.type == "histogram":
            if sample.name == f"{metric.name}_count":
                continue  # the last bucket has it
            if (bound := labels.pop("le", None)) is not None:
                bounds[bound] = None
        label_names = tuple(labels)
        values.setdefault(tuple(labels.values()), []).append(sample.value)
    return Family(
        metric.name,
        _KINDS[metric.type],
        metric.documentation,
        rule,
        label_names,
        [Series(labels, numbers) for labels, numbers in values.items()],
        list(bounds),
    )


def render(families: Sequence[Family]) -> bytes:
    """What Prometheus reads."""
    return prometheus.generate_latest(_Collected(families))


class _Collected(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return map(_to_prometheus, self._families)


def _to_prometheus(family: Family) -> Metric:
    match family.kind:
        case "counter":
            counter = CounterMetricFamily(
                family.name, family.documentation, labels=family.label_names
            )
            for labels, value in _single(family):
                counter.add_metric(labels, value)
            return counter
        case "gauge":
            gauge = GaugeMetricFamily(family.name, family.documentation, labels=family.label_names)
            for labels, value in _single(family):
                gauge.add_metric(labels, value)
            return gauge
        case "histogram":
            histogram = HistogramMetricFamily(
                family.name, family.documentation, labels=family.label_names
            )
            for series in family.series:
                *counts, total = series.values
                buckets = list(zip(family.bounds, counts, strict=True))
                histogram.add_metric(series.labels, buckets, total)
            return histogram
        case _:
            assert_never(family.kind)


def _single(family: Family) -> Iterator[tuple[tuple[str, ...], float]]:
    for series in family.series:
        [value] = series.values
        yield series.labels, value
