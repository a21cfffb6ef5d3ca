"""What Prometheus sees."""

from collections.abc import Iterator

import pytest

from api.metrics import Metrics
from engine.codec import pack_tokens
from engine.wire import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineLoad,
    EventKind,
    OutputDetails,
    PrefillStats,
    SchedulerStats,
)
from tests.helpers.http_server import HttpServer, serving, wait_for

LABELS = '{engine="0",model_name="m"}'


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving() as server:
        yield server


def value(metrics: Metrics, sample: str) -> float:
    for line in metrics.render().decode().splitlines():
        name, _, number = line.rpartition(" ")
        if name == sample:
            return float(number)
    raise AssertionError(f"no sample {sample}")


def test_finished_request_is_booked_everywhere() -> None:
    """Tokens, reasons and one observation in every histogram."""
    with serving() as server:
        server.complete(prompt="hello")

        assert server.metric(f"raywire:prompt_tokens_total{LABELS}") == 5
        assert server.metric(f"raywire:generation_tokens_total{LABELS}") == 6
        for name in (
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
        ):
            assert server.metric(f"raywire:{name}_count{LABELS}") == 1
        assert server.metric(f"raywire:inter_token_latency_seconds_count{LABELS}") == 5
        stop = '{engine="0",finished_reason="stop",model_name="m"}'
        assert server.metric(f"raywire:request_success_total{stop}") == 1


def test_core_statistics_are_taken_over(server: HttpServer) -> None:
    """Gauges return to zero when nothing runs; lookups in the prefix cache are counted."""
    server.complete(prompt="hello")

    wait_for(lambda: server.metric(f"raywire:num_requests_running{LABELS}") == 0)
    assert server.metric(f"raywire:num_requests_waiting{LABELS}") == 0
    assert server.metric(f"raywire:kv_cache_usage_perc{LABELS}") == 0
    assert server.metric(f"raywire:prefix_cache_queries_total{LABELS}") >= 5
    assert server.metric(f"raywire:num_preemptions_total{LABELS}") == 0


def test_stop_string_counts_as_stop(server: HttpServer) -> None:
    """The engine saw an abort, the client a stop: the client's view counts."""
    stop = 'raywire:request_success_total{engine="0",finished_reason="stop",model_name="m"}'
    abort = stop.replace('"stop"', '"abort"')
    before = server.metric(stop), server.metric(abort)

    server.complete(prompt="abcdef", stop=["cd"])

    assert (server.metric(stop), server.metric(abort)) == (before[0] + 1, before[1])


def test_names_are_vllms_behind_our_prefix(server: HttpServer) -> None:
    """The ones that dashboards read, under one `sed`."""
    text = server.http.get("/metrics").text

    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "generation_tokens_total",
        "request_success_total",
        "request_num_preemptions_count",
        "cache_config_info",
    ):
        assert f"raywire:{name}{{" in text, name


def test_counters_survive_a_new_incarnation_of_a_core() -> None:
    """Its own counts start again at zero; ours only grow."""
    metrics = Metrics("m", num_engines=1)
    for queries in (100, 150, 20, 30):
        metrics.on_stats(0, SchedulerStats(0, 0, 0.0, prefix_cache_queries=queries))

    assert value(metrics, f"raywire:prefix_cache_queries_total{LABELS}") == 180


def test_gauges_of_dead_cores_are_zero() -> None:
    """Nothing runs on an engine core that is gone, whatever the coordinator still says; what was
    counted stays."""
    metrics = Metrics("m", num_engines=1)
    metrics.on_stats(0, SchedulerStats(3, 4, 0.5, num_preemptions=2))

    metrics.on_death()
    metrics.on_load(0, EngineLoad(0, 0, 4, 3, 0.5))

    assert value(metrics, f"raywire:num_requests_running{LABELS}") == 0
    assert value(metrics, f"raywire:num_requests_waiting{LABELS}") == 0
    assert value(metrics, f"raywire:num_preemptions_total{LABELS}") == 2


def test_preempted_request_has_the_right_times() -> None:
    """Queue time holds all waiting: 1 s at first and 5 s after the preemption."""
    metrics = Metrics("m", num_engines=1)
    record = metrics.record(arrived_at=0.0)

    def output(*events: tuple[EventKind, float], tokens: int = 0) -> EngineCoreOutput:
        details = OutputDetails(
            events=[EngineCoreEvent(*event) for event in events],
            prefill_stats=PrefillStats(8, 4) if record.first_token_at is None else None,
        )
        return EngineCoreOutput("r", pack_tokens([1] * tokens), details=details)

    record.update(output((EventKind.QUEUED, 0.0), (EventKind.SCHEDULED, 1.0), tokens=1), 3.0)
    record.update(output((EventKind.PREEMPTED, 4.0)), 4.0)
    record.update(output((EventKind.SCHEDULED, 9.0), tokens=1), 11.0)
    record.finish("stop", num_prompt_tokens=8, num_output_tokens=2)
    record.finish("abort", num_prompt_tokens=8, num_output_tokens=2)  # has no effect

    assert value(metrics, f"raywire:request_queue_time_seconds_sum{LABELS}") == 6.0
    assert value(metrics, f"raywire:request_prefill_time_seconds_sum{LABELS}") == 2.0
    assert value(metrics, f"raywire:request_decode_time_seconds_sum{LABELS}") == 3.0
    assert value(metrics, f"raywire:request_num_preemptions_sum{LABELS}") == 1
    assert value(metrics, f"raywire:prompt_tokens_cached_total{LABELS}") == 4


def test_gaps_between_tokens_are_a_histogram() -> None:
    """Cumulative, with a bound that belongs to its own bucket, and all beyond the last in +Inf."""
    metrics = Metrics("m", 1)
    record = metrics.record(0.0)
    for timestamp in (0.0, 0.001, 0.004, 100.004):
        record.update(EngineCoreOutput("r", pack_tokens([1])), timestamp)

    def bucket(bound: str) -> float:
        labels = f'{{engine="0",le="{bound}",model_name="m"}}'
        return value(metrics, f"raywire:inter_token_latency_seconds_bucket{labels}")

    assert [bucket(b) for b in ("0.001", "0.0025", "0.005", "80.0", "+Inf")] == [1, 1, 2, 2, 3]
    assert value(metrics, f"raywire:inter_token_latency_seconds_count{LABELS}") == 3
    assert value(metrics, f"raywire:inter_token_latency_seconds_sum{LABELS}") == pytest.approx(
        100.004
    )
