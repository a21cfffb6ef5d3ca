"""Prometheus metrics of one API server.

Names are vLLM's behind our own prefix, so its dashboards fit after one
`sed 's/vllm:/raywire:/g'`. Labels are vLLM's too: `model_name` and `engine`. Times:

- time to first token and end-to-end latency: on this process's clock, from the arrival of the
  request's body to the first token, and to the last, here: with tokenizing and both wires.
- between two tokens: the core's stamps of the two steps.
- queue, prefill, decode: the core's stamps (`timeline` defines them for preempted requests too).

Counters only grow. Those that an engine core counts itself are taken over as differences, so they
go on growing when the core is replaced and starts again at zero.

Where there are several API servers, each has metrics of its own, and what is told to a scraper is
merged from all (`metrics_merge`, by the rules in `_RULES`).
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol, get_args

import prometheus_client as prometheus
from msgspec.structs import replace
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from api.load_balancer import Route, Rule
from api.metric_families import Family, MergeRule, from_prometheus
from api.timeline import Timeline
from engine.wire import EngineCoreOutput, EngineLoad, EngineReady, SchedulerStats

CONTENT_TYPE = prometheus.CONTENT_TYPE_PLAIN_0_0_4

_PREFIX = "raywire:"
_TOKEN_BYTES = 4
_LABELS = ("model_name", "engine")

_RULES: dict[str, MergeRule] = {
    "num_requests_running": "latest",
    "num_requests_waiting": "latest",
    "kv_cache_usage_perc": "latest",
    "cache_config_info": "max",
    "prefix_cache_queries": "max",
    "prefix_cache_hits": "max",
    "num_preemptions": "max",
    "dropped_messages": "max",
    "wire_dropped_messages": "sum",
    "wire_refused_connections": "sum",
}
"""How several API servers' metrics are merged. Those that are not here: counters and histograms are
added up, gauges and all of the process are kept apart."""

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_BUCKETS = tuple(
    float(step * 10**power) for power in range(6) for step in (1, 2, 5)
)  # 1, 2, 5, 10, … 500,000


class MetricsExchange(Protocol):
    """The way to the other API servers on the same port. All calls on the event loop."""

    def attach(self, read: Callable[[], list[Family]]) -> None:
        """From now on `read` is called, on the event loop, whenever any of them is scraped."""
        ...

    async def collect(self) -> list[Family]:
        """What all of them have now, this one too, merged.

        Raises:
            UnavailableError: nobody has collected it in time.
        """
        ...


class Metrics:
    """All metrics of one API server, in a registry of their own.

    Args:
        model_name: the label.
        num_engines: engine cores, by index everywhere in here.
        first_rank: label of the first one; see `ApiConfig`.
    """

    def __init__(self, model_name: str, num_engines: int, first_rank: int = 0) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        self._families = _Families(self.registry)
        self._is_over = False
        self._engines = [
            EngineMetrics(self._families, model_name, first_rank + index)
            for index in range(num_engines)
        ]
        self.registry.register(_GapCollector(self._engines))

    def on_ready(self, ready: Sequence[EngineReady]) -> None:
        """Publish what the engine cores said about their caches."""
        for each in ready:
            self._families.cache_config.labels(
                *self._engines[each.engine_index].labels,
                str(each.block_size),
                str(each.num_gpu_blocks),
                each.dtype,
            ).set(1)

    def on_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        """Take over what an engine core says of itself."""
        self._engines[engine_index].on_stats(stats)

    def on_load(self, engine_index: int, load: EngineLoad) -> None:
        """Take over what the coordinator says of an engine core: it may be busy with the requests
        of other API servers only."""
        if not self._is_over:  # the coordinator may not have heard of the end
            self._engines[engine_index].on_load(load)

    def on_death(self) -> None:
        """Nothing runs or waits on engine cores that are gone."""
        self._is_over = True
        for engine in self._engines:
            engine.on_load(SchedulerStats(0, 0, 0.0))

    def on_route(self, route: Route) -> None:
        """A sequence has been sent to an engine core."""
        self._engines[route.rank].routed[route.rule].inc()

    def record(self, arrived_at: float) -> "RequestRecord":
        """The record of one sequence of a request whose body arrived at `time.monotonic()`."""
        return RequestRecord(self._engines, arrived_at)

    def watch(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when the metrics are."""
        gauge = prometheus.Gauge(_PREFIX + name, documentation, registry=self.registry)
        gauge.set_function(read)

    def render(self) -> bytes:
        """What Prometheus reads, if this is the only API server."""
        self._settle()
        return prometheus.generate_latest(self.registry)

    def read(self) -> list[Family]:
        """The same, to be merged with what the other API servers have."""
        self._settle()
        return [self._read(metric) for metric in self.registry.collect()]

    def _settle(self) -> None:
        for engine in self._engines:
            engine.settle()

    def _read(self, metric: Metric) -> Family:
        family = from_prometheus(metric, _rule(metric))
        if family.rule != "latest":
            return family
        told_at = {engine.labels: engine.told_at for engine in self._engines}
        series = [replace(each, stamp=told_at[each.labels]) for each in family.series]
        return replace(family, series=series)


def _rule(metric: Metric) -> MergeRule:
    if metric.name.startswith("process_"):
        return "each"
    default: MergeRule = "each" if metric.type == "gauge" else "sum"
    return _RULES.get(metric.name.removeprefix(_PREFIX), default)


class RequestRecord(Timeline):
    """Times and counts of one sequence, booked when they happen or when it ends."""

    __slots__ = ("_arrived_at", "_engines", "_has_token", "_is_booked")

    def __init__(self, engines: "Sequence[EngineMetrics]", arrived_at: float) -> None:
        super().__init__(self._on_gap)
        self._engines = engines
        self._arrived_at = arrived_at
        self._has_token = False
        self._is_booked = False

    def update(self, output: EngineCoreOutput, timestamp: float) -> None:
        super().update(output, timestamp)
        engine = self._engines[self.engine_index]
        if output.new_token_ids:
            engine.num_new_tokens += len(output.new_token_ids) // _TOKEN_BYTES
            if not self._has_token:
                self._has_token = True
                engine.first_token.observe(time.monotonic() - self._arrived_at)
        if output.details is not None and (stats := output.details.prefill_stats) is not None:
            engine.prompt_tokens.inc(stats.num_prompt_tokens)
            engine.prompt_tokens_cached.inc(stats.num_cached_tokens)

    def finish(self, reason: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Book the sequence, once. `reason` is the finish reason as the API spells it."""
        if self._is_booked:
            return
        self._is_booked = True
        engine = self._engines[self.engine_index]
        engine.finished(reason)
        engine.end_to_end.observe(time.monotonic() - self._arrived_at)
        engine.request_prompt_tokens.observe(num_prompt_tokens)
        engine.request_generation_tokens.observe(num_output_tokens)
        engine.request_preemptions.observe(self.num_preemptions)
        if self.was_scheduled:
            engine.queue.observe(self.queue_s)
        if self.first_token_at is not None:
            engine.prefill.observe(self.prefill_s)
            engine.decode.observe(self.decode_s)
            engine.inference.observe(self.prefill_s + self.decode_s)

    def _on_gap(self, gap_s: float) -> None:
        self._engines[self.engine_index].gaps.observe(gap_s)


class _Gaps:
    """Seconds between two tokens: additions, where Prometheus's own histogram takes locks for each
    observation and searches its buckets one by one. There is one for each token."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self.counts = [0] * (len(_GAP_BUCKETS) + 1)
        """By bucket, not summed up; the last is beyond all bounds."""

    def observe(self, gap_s: float) -> None:
        self.sum_s += gap_s
        self.counts[bisect_left(_GAP_BUCKETS, gap_s)] += 1


class EngineMetrics:
    """The metrics of one engine core, with its labels filled in once."""

    def __init__(self, families: "_Families", model_name: str, rank: int) -> None:
        labels = (model_name, str(rank))
        self.labels: tuple[str, ...] = labels
        self.told_at = 0.0
        """`time.monotonic()` of the last news. The API servers of one port share a machine, and so
        that clock."""
        self._success = families.success
        self._last = SchedulerStats(0, 0, 0.0)
        self._load: SchedulerStats | EngineLoad = self._last
        """The last news: gauges show it when the metrics are read."""
        self._running = families.running.labels(*labels)
        self._waiting = families.waiting.labels(*labels)
        self._cache_usage = families.cache_usage.labels(*labels)
        self._prefix_queries = families.prefix_queries.labels(*labels)
        self._prefix_hits = families.prefix_hits.labels(*labels)
        self._preemptions = families.preemptions.labels(*labels)
        self._dropped = families.dropped.labels(*labels)
        self.prompt_tokens = families.prompt_tokens.labels(*labels)
        self.prompt_tokens_cached = families.prompt_tokens_cached.labels(*labels)
        self.num_new_tokens = 0
        """Generated since the metrics were last read: an addition per token, not a lock."""
        self._generation_tokens = families.generation_tokens.labels(*labels)
        self.first_token = families.first_token.labels(*labels)
        self.gaps = _Gaps()
        self.end_to_end = families.end_to_end.labels(*labels)
        self.queue = families.queue.labels(*labels)
        self.prefill = families.prefill.labels(*labels)
        self.decode = families.decode.labels(*labels)
        self.inference = families.inference.labels(*labels)
        self.request_prompt_tokens = families.request_prompt_tokens.labels(*labels)
        self.request_generation_tokens = families.request_generation_tokens.labels(*labels)
        self.request_preemptions = families.request_preemptions.labels(*labels)
        self.routed = {rule: families.routed.labels(*labels, rule) for rule in get_args(Rule)}
        for reason in ("stop", "length", "abort", "error", "repetition"):
            families.success.labels(*labels, reason)  # there from the start, at zero

    def settle(self) -> None:
        """Book what has been put off."""
        self._running.set(self._load.num_running)
        self._waiting.set(self._load.num_waiting)
        self._cache_usage.set(self._load.kv_cache_usage)
        self._generation_tokens.inc(self.num_new_tokens)
        self.num_new_tokens = 0

    def finished(self, reason: str) -> None:
        self._success.labels(*self.labels, reason).inc()

    def on_load(self, load: SchedulerStats | EngineLoad) -> None:
        self.told_at = time.monotonic()
        self._load = load

    def on_stats(self, stats: SchedulerStats) -> None:
        self.on_load(stats)
        last, self._last = self._last, stats
        if _counters(stats) == _counters(last):  # as in most steps, and a lock for each
            return
        self._prefix_queries.inc(_grown(stats.prefix_cache_queries, last.prefix_cache_queries))
        self._prefix_hits.inc(_grown(stats.prefix_cache_hits, last.prefix_cache_hits))
        self._preemptions.inc(_grown(stats.num_preemptions, last.num_preemptions))
        self._dropped.inc(_grown(stats.num_dropped_messages, last.num_dropped_messages))


class _GapCollector(Collector):
    """The times between tokens as a histogram, when somebody asks for it."""

    def __init__(self, engines: Sequence[EngineMetrics]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            _PREFIX + "inter_token_latency_seconds",
            "Between a sequence's steps with tokens",
            labels=_LABELS,
        )
        bounds = [*map(str, _GAP_BUCKETS), "+Inf"]
        for engine in self._engines:
            buckets = list(zip(bounds, accumulate(engine.gaps.counts), strict=True))
            family.add_metric(engine.labels, buckets, engine.gaps.sum_s)
        yield family


def _counters(stats: SchedulerStats) -> tuple[int, ...]:
    """All that an engine core counts and we take over."""
    return (
        stats.prefix_cache_queries,
        stats.prefix_cache_hits,
        stats.num_preemptions,
        stats.num_dropped_messages,
    )


def _grown(now: int, before: int) -> int:
    """How much a core's counter has grown; one that is smaller has started again at zero."""
    return now - before if now >= before else now


class _Families:
    """Every metric by name, without labels."""

    def __init__(self, registry: prometheus.CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> prometheus.Gauge:
            return prometheus.Gauge(_PREFIX + name, text, (*_LABELS, *labels), registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> prometheus.Counter:
            return prometheus.Counter(_PREFIX + name, text, (*_LABELS, *labels), registry=registry)

        def histogram(
            name: str, text: str, buckets: Sequence[float] = _REQUEST_BUCKETS
        ) -> prometheus.Histogram:
            return prometheus.Histogram(
                _PREFIX + name, text, _LABELS, registry=registry, buckets=buckets
            )

        self.running = gauge("num_requests_running", "Requests that run in the current step")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for their turn")
        self.cache_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")
        self.cache_config = gauge(
            "cache_config_info",
            "KV cache of each engine core; always 1",
            ("block_size", "num_gpu_blocks", "dtype"),
        )
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.preemptions = counter("num_preemptions", "Requests preempted for lack of KV blocks")
        self.dropped = counter("dropped_messages", "Messages that broke the protocol, at the core")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, computed or found")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens found in cache")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.success = counter(
            "request_success", "Sequences ended, by finish reason", ("finished_reason",)
        )
        self.routed = counter(
            "requests_routed", "Sequences sent, by why this engine core was chosen", ("rule",)
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_BUCKETS
        )
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the end")
        self.queue = histogram("request_queue_time_seconds", "Waiting, also after preemptions")
        self.prefill = histogram("request_prefill_time_seconds", "Running, up to the first token")
        self.decode = histogram("request_decode_time_seconds", "Running, after the first token")
        self.inference = histogram("request_inference_time_seconds", "Prefill and decode together")
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of each sequence", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for each sequence", _TOKEN_BUCKETS
        )
        self.request_preemptions = histogram(
            "request_num_preemptions", "Preemptions of each sequence", (0.0, 1.0, 2.0, 5.0, 10.0)
        )
