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
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Protocol, get_args

import prometheus_client as prometheus
from msgspec.structs import replace
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from api.admission import Flow
from api.engine_handle import EngineHandle
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
    "engine_up": "max",
    "engine_losses": "max",
    "cache_config_info": "max",
    "prefix_cache_queries": "max",
    "prefix_cache_hits": "max",
    "prefix_cache_evictions": "max",
    "num_preemptions": "max",
    "dropped_messages": "max",
    "wire_dropped_messages": "sum",
    "wire_refused_connections": "sum",
    "unauthorized_requests": "sum",
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
        self._cache_config = prometheus.Gauge(
            _PREFIX + "cache_config_info",
            "KV cache of each engine core; always 1",
            (*_LABELS, "block_size", "num_gpu_blocks", "dtype"),
            registry=self.registry,
        )
        self.flow = Flow()
        """For whoever lets requests in."""
        self._model_name = model_name
        self._is_over = False
        self._engines = [
            EngineMetrics(model_name, first_rank + index) for index in range(num_engines)
        ]
        self.registry.register(_EngineCollector(self._engines))

    def watch_engines(self, engines: Sequence[EngineHandle]) -> None:
        """Tell, when asked, which of them are up."""
        for engine, handle in zip(self._engines, engines, strict=True):
            engine.handle = handle

    def on_ready(self, ready: Sequence[EngineReady]) -> None:
        """Publish what the engine cores said about their caches."""
        for each in ready:
            self._cache_config.labels(
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
        self._engines[route.rank].num_routed[route.rule] += 1

    def record(self, arrived_at: float) -> "RequestRecord":
        """The record of one sequence of a request whose body arrived at `time.monotonic()`."""
        return RequestRecord(self._engines, self.flow, arrived_at)

    def watch(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when the metrics are."""
        gauge = prometheus.Gauge(_PREFIX + name, documentation, registry=self.registry)
        gauge.set_function(read)

    def count(
        self,
        name: str,
        documentation: str,
        label: str,
        read: Callable[[], Mapping[str, float]],
    ) -> None:
        """Add a counter that is read when the metrics are: a value for each value of `label`."""
        collector = _LabelledCounter(_PREFIX + name, documentation, self._model_name, label, read)
        self.registry.register(collector)

    def render(self) -> bytes:
        """What Prometheus reads, if this is the only API server."""
        return prometheus.generate_latest(self.registry)

    def read(self) -> list[Family]:
        """The same, to be merged with what the other API servers have."""
        return [self._read(metric) for metric in self.registry.collect()]

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

    __slots__ = ("_engines", "_flow", "_is_booked", "_num_queued_tokens", "arrived_at")

    def __init__(self, engines: "Sequence[EngineMetrics]", flow: Flow, arrived_at: float) -> None:
        super().__init__()
        self._engines = engines
        self._flow = flow
        self._num_queued_tokens = 0
        self.arrived_at = arrived_at
        self._is_booked = False

    def wait_for_prefill(self, num_prompt_tokens: int) -> None:
        """The prompt has been sent: its tokens wait until they are computed."""
        self._num_queued_tokens = num_prompt_tokens
        self._flow.on_sent(num_prompt_tokens)

    def update(self, output: EngineCoreOutput, timestamp: float) -> None:
        engine = self._engines[self.engine_index]
        if output.new_token_ids:
            engine.num_generation_tokens += len(output.new_token_ids) // _TOKEN_BYTES
            if self.first_token_at is None:
                engine.first_token.observe(time.monotonic() - self.arrived_at)
                self._end_wait()
            elif self.last_token_at is not None:  # by the same engine core's clock
                engine.gaps.observe(max(0.0, timestamp - self.last_token_at))
        if output.details is not None and (stats := output.details.prefill_stats) is not None:
            engine.num_prompt_tokens += stats.num_prompt_tokens
            engine.num_prompt_tokens_cached += stats.num_cached_tokens
        super().update(output, timestamp)

    def finish(self, reason: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Book the sequence, once. `reason` is the finish reason as the API spells it."""
        if self._is_booked:
            return
        self._is_booked = True
        self._end_wait()
        self._flow.on_finished()
        engine = self._engines[self.engine_index]
        engine.num_finished[reason] += 1
        engine.end_to_end.observe(time.monotonic() - self.arrived_at)
        engine.request_prompt_tokens.observe(num_prompt_tokens)
        engine.request_generation_tokens.observe(num_output_tokens)
        engine.request_preemptions.observe(self.num_preemptions)
        if self.was_scheduled:
            engine.queue.observe(self.queue_s)
        if self.first_token_at is not None:
            engine.prefill.observe(self.prefill_s)
            engine.decode.observe(self.decode_s)
            engine.inference.observe(self.prefill_s + self.decode_s)

    def _end_wait(self) -> None:
        """The prompt has been computed, or never will be. Of several sequences one has it."""
        if self._num_queued_tokens:
            self._flow.on_prefilled(self._num_queued_tokens)
            self._num_queued_tokens = 0


class Histogram:
    """How often which values were observed."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.total = 0.0
        """The sum of all values."""
        self._counts = [0] * (len(bounds) + 1)
        """By bucket, not summed up; the last is beyond all bounds."""

    def observe(self, value: float) -> None:
        self.total += value
        self._counts[bisect_left(self.bounds, value)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """The bounds, as Prometheus writes them, and how many values were up to each."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


class EngineMetrics:
    """What is counted of one engine core. Plain numbers, because they are added to for each token
    and each request, and read when somebody scrapes: Prometheus's own take a lock for each addition
    and search their buckets one by one, which cost a request 60 us.
    """

    def __init__(self, model_name: str, rank: int) -> None:
        self.labels: tuple[str, ...] = (model_name, str(rank))
        self.handle = EngineHandle(0, rank)
        self.told_at = 0.0
        """`time.monotonic()` of the last news. The API servers of one port share a machine, and so
        that clock."""
        self.load: SchedulerStats | EngineLoad = SchedulerStats(0, 0, 0.0)
        """The last news."""
        self._last = SchedulerStats(0, 0, 0.0)
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_preemptions = 0
        self.num_evictions = 0
        self.num_dropped = 0
        self.num_prompt_tokens = 0
        self.num_prompt_tokens_cached = 0
        self.num_generation_tokens = 0
        self.num_finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.num_routed: dict[Rule, int] = dict.fromkeys(get_args(Rule), 0)
        self.first_token = Histogram(_FIRST_TOKEN_BUCKETS)
        self.gaps = Histogram(_GAP_BUCKETS)
        self.end_to_end = Histogram(_REQUEST_BUCKETS)
        self.queue = Histogram(_REQUEST_BUCKETS)
        self.prefill = Histogram(_REQUEST_BUCKETS)
        self.decode = Histogram(_REQUEST_BUCKETS)
        self.inference = Histogram(_REQUEST_BUCKETS)
        self.request_prompt_tokens = Histogram(_TOKEN_BUCKETS)
        self.request_generation_tokens = Histogram(_TOKEN_BUCKETS)
        self.request_preemptions = Histogram((0.0, 1.0, 2.0, 5.0, 10.0))

    @property
    def is_up(self) -> float:
        return float(self.handle.state == "up")

    @property
    def num_losses(self) -> float:
        return float(self.handle.epoch)

    def on_load(self, load: SchedulerStats | EngineLoad) -> None:
        self.told_at = time.monotonic()
        self.load = load

    def on_stats(self, stats: SchedulerStats) -> None:
        self.on_load(stats)
        last, self._last = self._last, stats
        self.num_prefix_queries += _grown(stats.prefix_cache_queries, last.prefix_cache_queries)
        self.num_prefix_hits += _grown(stats.prefix_cache_hits, last.prefix_cache_hits)
        self.num_preemptions += _grown(stats.num_preemptions, last.num_preemptions)
        self.num_evictions += _grown(stats.num_evicted_blocks, last.num_evicted_blocks)
        self.num_dropped += _grown(stats.num_dropped_messages, last.num_dropped_messages)


def _grown(now: int, before: int) -> int:
    """How much a core's counter has grown; one that is smaller has started again at zero."""
    return now - before if now >= before else now


_GAUGES = (
    ("num_requests_running", "Requests that run in the current step", "load.num_running"),
    ("num_requests_waiting", "Requests that wait for their turn", "load.num_waiting"),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", "load.kv_cache_usage"),
    ("engine_up", "1 while the engine core can take requests, else 0", "is_up"),
)
"""Name, meaning, and where `EngineMetrics` has it; so with the others."""

_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up", "num_prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "num_prefix_hits"),
    ("prefix_cache_evictions", "Cached blocks that made room for others", "num_evictions"),
    ("num_preemptions", "Requests preempted for lack of KV blocks", "num_preemptions"),
    ("dropped_messages", "Messages that broke the protocol, at the core", "num_dropped"),
    ("prompt_tokens", "Prompt tokens, computed or found", "num_prompt_tokens"),
    ("prompt_tokens_cached", "Prompt tokens found in cache", "num_prompt_tokens_cached"),
    ("generation_tokens", "Tokens generated", "num_generation_tokens"),
    ("engine_losses", "Times the engine core was lost, and others went on", "num_losses"),
)
_LABELLED_COUNTERS = (
    ("request_success", "Sequences ended, by finish reason", "num_finished", "finished_reason"),
    (
        "requests_routed",
        "Sequences sent, by why this engine core was chosen",
        "num_routed",
        "rule",
    ),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token", "first_token"),
    ("inter_token_latency_seconds", "Between a sequence's steps with tokens", "gaps"),
    ("e2e_request_latency_seconds", "From arrival to the end", "end_to_end"),
    ("request_queue_time_seconds", "Waiting, also after preemptions", "queue"),
    ("request_prefill_time_seconds", "Running, up to the first token", "prefill"),
    ("request_decode_time_seconds", "Running, after the first token", "decode"),
    ("request_inference_time_seconds", "Prefill and decode together", "inference"),
    ("request_prompt_tokens", "Prompt tokens of each sequence", "request_prompt_tokens"),
    (
        "request_generation_tokens",
        "Tokens generated for each sequence",
        "request_generation_tokens",
    ),
    ("request_num_preemptions", "Preemptions of each sequence", "request_preemptions"),
)


class _LabelledCounter(Collector):
    """One counter of an API server, which somebody else keeps."""

    def __init__(
        self,
        name: str,
        documentation: str,
        model_name: str,
        label: str,
        read: Callable[[], Mapping[str, float]],
    ) -> None:
        self._family = (name, documentation, ("model_name", label))
        self._model_name = model_name
        self._read = read

    def collect(self) -> Iterable[Metric]:
        name, documentation, labels = self._family
        counter = CounterMetricFamily(name, documentation, labels=labels)
        for value, count in self._read().items():
            counter.add_metric((self._model_name, value), count)
        yield counter


class _EngineCollector(Collector):
    """All metrics of the engine cores, when somebody asks for them."""

    def __init__(self, engines: Sequence[EngineMetrics]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        for name, text, where in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for engine in self._engines:
                gauge.add_metric(engine.labels, attrgetter(where)(engine))
            yield gauge
        for name, text, where in _COUNTERS:
            counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for engine in self._engines:
                counter.add_metric(engine.labels, attrgetter(where)(engine))
            yield counter
        for name, text, where, label in _LABELLED_COUNTERS:
            counter = CounterMetricFamily(_PREFIX + name, text, labels=(*_LABELS, label))
            for engine in self._engines:
                for value, count in attrgetter(where)(engine).items():
                    counter.add_metric((*engine.labels, value), count)
            yield counter
        for name, text, where in _HISTOGRAMS:
            family = HistogramMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for engine in self._engines:
                histogram: Histogram = attrgetter(where)(engine)
                family.add_metric(engine.labels, histogram.buckets(), histogram.total)
            yield family
