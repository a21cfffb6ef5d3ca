"""Requests that share a server with little room: who goes first, what waiting costs, what ends one
of them, and that none of it changes another's stream."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream, completion_body, metric, wait_for_running

STEP_S = 0.02
FLAGS = {
    "--served-model-name": "m",
    "--scheduling-policy": "priority",
    "--max-num-seqs": "2",
    "--max-model-len": "1000",
    "--block-size": "16",
    "--num-gpu-blocks-override": "65",  # 1024 tokens, and the null block
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Speaks `abc` for ever, at 50 tokens a second."""
    model = make_slow_model(tmp_path_factory.mktemp("models"), STEP_S)
    flags = [word for flag in FLAGS.items() for word in flag]
    with running_server(str(model), *flags) as server:
        yield server


@contextlib.contextmanager
def seat_taken(server: Server) -> Iterator[None]:
    """One of the two places in the batch, as long as the block runs."""
    body = completion_body(stream=True, max_tokens=900)
    with server.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: the connection goes with it
        next(lines)
        yield


def wait_for_waiting(server: Server, count: int) -> None:
    """Wait until that many requests are in the queue."""
    wait_for(lambda: metric(server, "raywire:num_requests_waiting") == count, f"{count} in queue")


def test_the_lowest_priority_goes_first(server: Server) -> None:
    """Both seats are taken; who comes last has the lower number, and gets the first that is
    free."""
    with seat_taken(server), contextlib.ExitStack() as first_seat:
        first_seat.enter_context(seat_taken(server))
        patient = BackgroundStream(server, max_tokens=2, priority=7)
        wait_for_waiting(server, 1)
        urgent = BackgroundStream(server, max_tokens=25, priority=-7)
        wait_for_waiting(server, 2)
        first_seat.close()
        urgent.join()
        patient.join()

    assert urgent.finish_reasons == patient.finish_reasons == ["length"]
    assert urgent.started_at < patient.started_at


REQUEST_TIMES = [
    f"raywire:request_{stage}_time_seconds_sum" for stage in ("queue", "prefill", "decode")
]
SUMS = [
    *REQUEST_TIMES,
    "raywire:e2e_request_latency_seconds_sum",
    "raywire:num_preemptions_total",
    "raywire:request_num_preemptions_sum",
]


def test_preempted_requests_are_measured(server: Server) -> None:
    """Two prompts that fill the cache: one gives way to the other half-way, and its wait for the
    other's last tokens is queue time, although it has begun to answer."""
    wait_for_running(server, 0)
    before = {name: metric(server, name) for name in SUMS}
    body = completion_body(prompt=["x" * 496, "y" * 496], max_tokens=30)
    with server.http() as client:
        answer = client.post("/v1/completions", json=body).json()
    grown = {name: metric(server, name) - before[name] for name in SUMS}

    assert [choice["text"] for choice in answer["choices"]] == ["abc" * 10] * 2
    assert grown["raywire:num_preemptions_total"] == 1
    assert grown["raywire:request_num_preemptions_sum"] == 1
    # The blocks are used up at 512 tokens each, after 16 of the 30 that each shall say.
    assert grown["raywire:request_queue_time_seconds_sum"] >= 12 * STEP_S
    assert grown["raywire:request_decode_time_seconds_sum"] >= 2 * 28 * STEP_S
    assert sum(grown[name] for name in REQUEST_TIMES) <= grown[SUMS[3]]


def test_repetition_ends_a_request(server: Server) -> None:
    """Who asks for it is stopped after the fourth `abc`, with a finish reason that says why."""
    asked: dict[str, Any] = {
        "repetition_detection": {"max_pattern_size": 3, "min_count": 4},
        "max_tokens": 40,
    }
    stream = BackgroundStream(server, **asked)
    with server.http() as client:
        answer = client.post("/v1/completions", json=completion_body(**asked)).json()
    stream.join()

    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc" * 4, "repetition")
    assert (stream.text, stream.finish_reasons) == ("abc" * 4, ["repetition"])
    success = "raywire:request_success_total"
    assert metric(server, success, finished_reason="repetition") == 2


BAD = [
    b"{",
    *(
        json.dumps(completion_body(**fields)).encode()
        for fields in (
            {"prompt": ""},
            {"prompt": [10**6]},
            {"prompt": "x" * 1000},
            {"temperature": -1},
            {"max_tokens": 0},
            {"logit_bias": {"100000": 1}},
            {"n": 10**9},
            {"model": "nobody"},
            {"priority": 10**30},
            {"allowed_token_ids": [-1]},
        )
    ),
]


@pytest.mark.row("F-35")
def test_bad_requests_leave_a_neighbour_alone(server: Server) -> None:
    """They keep coming while a stream runs, and it says what its script says."""
    neighbour = BackgroundStream(server, max_tokens=45)
    assert neighbour.started.wait(10)
    num_refused = 0
    with server.http() as client:
        while not neighbour.finish_reasons and neighbour.failure is None:
            for body in BAD:
                assert client.post("/v1/completions", content=body).status_code in (400, 404)
                num_refused += 1
    neighbour.join()

    assert num_refused >= len(BAD)
    assert neighbour.text == "abc" * 15
    assert (neighbour.finish_reasons, neighbour.errors) == (["length"], [])
    assert metric(server, "raywire:dropped_messages_total") == 0
