"""One picture out of the metrics of several API servers."""

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.load_balancer import Route
from api.metric_families import Family, MergeRule, Series, render
from api.metrics import Metrics
from api.metrics_merge import merge
from engine.wire import EngineLoad, EngineReady, Fingerprint, SchedulerStats

ADDITIVE: tuple[MergeRule, ...] = ("sum", "max")

numbers = st.floats(0.0, 1e9) | st.integers(0, 1 << 53).map(float)


def family(rule: MergeRule, values: Mapping[str, Sequence[float]], stamp: float = 0.0) -> Family:
    """A family with one label; its series by that label's value."""
    series = [Series((label,), list(numbers), stamp) for label, numbers in values.items()]
    return Family("f", "counter", "text", rule, ("engine",), series)


def values(families: Sequence[Family], name: str = "f") -> dict[tuple[str, ...], list[float]]:
    [found] = [each for each in families if each.name == name]
    return {series.labels: series.values for series in found.series}


@st.composite
def parts(draw: st.DrawFn) -> dict[int, list[Family]]:
    """Up to five API servers' parts, some of which lack a series."""
    rule = draw(st.sampled_from(ADDITIVE))
    series = st.dictionaries(
        st.sampled_from("012"), st.lists(numbers, min_size=2, max_size=2), max_size=3
    )
    drawn = draw(st.lists(series, min_size=1, max_size=5))
    return {index: [family(rule, each)] for index, each in enumerate(drawn)}


@given(parts(), st.randoms())
def test_the_order_of_parts_does_not_matter(parts: dict[int, list[Family]], random: Random) -> None:
    """Not even in the last digit: whoever is asked says the same."""
    shuffled = list(parts.values())
    random.shuffle(shuffled)

    assert values(merge(dict(enumerate(shuffled)))) == values(merge(parts))


@given(parts(), st.data())
def test_the_whole_grows_when_parts_do(parts: dict[int, list[Family]], data: st.DataObject) -> None:
    """No counter falls from one scrape to the next, however little a part grows."""
    before = values(merge(parts))

    grown = {
        index: [
            family(
                each.rule,
                {
                    series.labels[0]: [data.draw(st.floats(v, 2e16)) for v in series.values]
                    for series in each.series
                },
            )
        ]
        for index, [each] in parts.items()
    }
    after = values(merge(grown))

    assert before.keys() == after.keys()
    for labels, old in before.items():
        assert all(new >= was for new, was in zip(after[labels], old, strict=True))


@pytest.mark.parametrize(("rule", "expected"), [("sum", 7.0), ("max", 4.0), ("latest", 3.0)])
def test_each_rule_in_a_word(rule: MergeRule, expected: float) -> None:
    """Added up, the largest, or the newest."""
    older, newer = family(rule, {"0": [4.0]}, stamp=1.0), family(rule, {"0": [3.0]}, stamp=2.0)

    assert values(merge({0: [older], 1: [newer]})) == {("0",): [expected]}
    assert values(merge({0: [newer], 1: [older]})) == {("0",): [expected]}


def test_what_is_kept_apart_gets_a_label() -> None:
    """Memory and CPU time of each process: their sum would say little, one of them less."""
    [merged] = merge({0: [family("each", {"": [5.0]})], 2: [family("each", {"": [6.0]})]})

    assert merged.label_names == ("engine", "api_server")
    assert values([merged]) == {("", "0"): [5.0], ("", "2"): [6.0]}


# ---------------------------------------------------------------------------- of real metrics


def sample(parts: Sequence[Metrics], name: str, **labels: str) -> float:
    """One value of the merged text."""
    all_labels = {"engine": "0", "model_name": "m", **labels}
    shown = ",".join(f'{key}="{all_labels[key]}"' for key in sorted(all_labels))
    text = render(merge({index: each.read() for index, each in enumerate(parts)})).decode()
    [line] = [each for each in text.splitlines() if each.startswith(f"raywire:{name}{{{shown}}} ")]
    return float(line.split()[-1])


def test_one_api_servers_families_are_its_own_text() -> None:
    """Reading and rendering leaves nothing out and changes nothing."""
    metrics = Metrics("m", num_engines=2)
    metrics.on_stats(1, SchedulerStats(1, 2, 0.5, num_preemptions=3))
    metrics.record(0.0).finish("stop", num_prompt_tokens=3, num_output_tokens=4)

    def without_process(text: bytes) -> list[bytes]:
        return [line for line in text.splitlines() if b"process_" not in line]

    assert without_process(render(metrics.read())) == without_process(metrics.render())


def test_what_engine_cores_count_is_not_counted_twice() -> None:
    """Both API servers hear of the same 9 preemptions, one of them later."""
    first, second = Metrics("m", 1), Metrics("m", 1)
    first.on_stats(0, SchedulerStats(0, 0, 0.0, num_preemptions=9))
    second.on_stats(0, SchedulerStats(0, 0, 0.0, num_preemptions=7))

    assert sample([first, second], "num_preemptions_total") == 9


def test_load_comes_from_whoever_heard_last() -> None:
    """Also of requests that the API server asked has no part in."""
    first, second = Metrics("m", 1), Metrics("m", 1)
    first.on_stats(0, SchedulerStats(5, 4, 0.5))
    second.on_load(0, EngineLoad(0, 0, num_waiting=0, num_running=2, kv_cache_usage=0.25))

    assert sample([first, second], "num_requests_running") == 2
    assert sample([first, second], "num_requests_waiting") == 0
    assert sample([second, first], "kv_cache_usage_perc") == 0.25


def test_what_api_servers_count_is_added_up() -> None:
    """Requests, by end and by route; observations, bucket by bucket."""
    parts = [Metrics("m", 1) for _ in range(3)]
    for each in parts:
        each.on_route(Route(rank=0, matched_blocks=0, num_queued=0, rule="load"))
        each.record(0.0).finish("stop", num_prompt_tokens=3, num_output_tokens=4)

    assert sample(parts, "requests_routed_total", rule="load") == 3
    assert sample(parts, "requests_routed_total", rule="pinned") == 0
    assert sample(parts, "request_success_total", finished_reason="stop") == 3
    assert sample(parts, "request_prompt_tokens_bucket", le="2.0") == 0
    assert sample(parts, "request_prompt_tokens_bucket", le="5.0") == 3
    assert sample(parts, "request_prompt_tokens_count") == 3
    assert sample(parts, "request_prompt_tokens_sum") == 9


def test_engine_cores_are_labelled_by_their_rank_among_all_servers() -> None:
    """With hybrid balancing a server's first engine core may be rank 4."""
    metrics = Metrics("m", num_engines=2, first_rank=4)
    ready = EngineReady(1, 0, 64, 8, 16, 128, "float32", 300, 4, Fingerprint(1, "", {}, "", ""))
    metrics.on_ready([ready])
    metrics.on_stats(1, SchedulerStats(0, 7, 0.0))
    metrics.record(0.0).finish("stop", num_prompt_tokens=3, num_output_tokens=4)

    assert sample([metrics], "num_requests_running", engine="5") == 7
    assert sample([metrics], "request_success_total", engine="4", finished_reason="stop") == 1
    info = {"block_size": "16", "num_gpu_blocks": "8", "dtype": "float32"}
    assert sample([metrics, metrics], "cache_config_info", engine="5", **info) == 1


def test_no_gauge_is_added_up_by_accident() -> None:
    """Half a cache twice is no whole cache: a new gauge is kept apart unless somebody decides."""
    metrics = Metrics("m", 1)
    metrics.watch("something_new", "text", lambda: 1.0)

    rules = {each.name: each.rule for each in metrics.read()}
    assert rules["raywire:something_new"] == "each"
    assert {rule for name, rule in rules.items() if name.startswith("process_")} == {"each"}
    assert rules["raywire:kv_cache_usage_perc"] == "latest"
