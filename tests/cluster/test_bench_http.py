"""The client of `raywire bench serve`, against servers that do what a test has written down."""

import itertools
import json
import time

import pytest

from cluster.bench.http_load import Endpoint, LoadResult, run_load
from engine.errors import ConfigError
from tests.helpers.canned_http import CannedServer, canned_server, chunk, stream

TEXT = '{"choices": [{"text": "a"}]}'
USAGE = '{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}'
ROLE = '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
DELTA = '{"choices": [{"delta": {"content": "a"}}]}'


def load(server: CannedServer, count: int = 1, max_concurrency: int | None = 1) -> LoadResult:
    endpoint = Endpoint("127.0.0.1", server.port, "/v1/completions")
    bodies = [{"number": number} for number in range(count)]
    return run_load(endpoint, bodies, max_concurrency=max_concurrency)


def test_times_follow_the_events_and_tokens_the_usage() -> None:
    """An event may bring several tokens, so that only the usage knows how many there were."""
    with canned_server(stream(TEXT, TEXT, TEXT, USAGE)) as server:
        (answer,) = load(server).answers

    assert answer.error is None
    assert (answer.num_prompt_tokens, answer.num_tokens) == (7, 5)
    assert len(answer.between_events_s) == 2
    assert 0 < answer.first_token_s < answer.whole_s
    assert answer.per_token_s == pytest.approx((answer.whole_s - answer.first_token_s) / 4)


def test_without_a_usage_events_are_counted() -> None:
    """Not every server sends one."""
    with canned_server(stream(TEXT, TEXT)) as server:
        assert load(server).num_tokens == 2


def test_the_first_event_of_a_chat_is_no_token() -> None:
    """It says only who speaks, and may come before the prompt is computed."""
    with canned_server(stream(ROLE, DELTA, DELTA)) as server:
        assert load(server).num_tokens == 2


def test_events_may_come_in_any_pieces() -> None:
    """TCP and chunks cut where they like, inside of an event too."""
    head, *parts = stream(TEXT, TEXT, USAGE)
    content = b"".join(f"data: {event}\n\n".encode() for event in (TEXT, TEXT, USAGE))
    pieces = [chunk(bytes([byte])) for byte in content]
    with canned_server([head, b"".join(pieces[:70]), b"".join(pieces[70:]), chunk(b"")]) as server:
        (answer,) = load(server).answers

    assert answer.error is None
    assert len(answer.event_s) == 2
    assert answer.num_tokens == 5
    assert parts


def test_an_answer_that_is_not_streamed_is_one_event() -> None:
    """One JSON object, in any pieces, with its usage; the connection is used again."""
    body = b'{"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    reply = [head % len(body) + body[:10], body[10:]]
    with canned_server(reply, reply) as server:
        answers = load(server, count=2).answers

    assert [(each.num_tokens, len(each.event_s), each.error) for each in answers] == [
        (2, 1, None)
    ] * 2
    assert server.num_connections == 1


def test_connections_are_kept_and_used_again() -> None:
    """As real clients do: what is measured is no handshake."""
    with canned_server(*itertools.repeat(stream(TEXT), 5)) as server:
        result = load(server, count=5)

    assert not result.errors
    assert server.num_connections == 1
    assert [json.loads(body)["number"] for body in server.bodies] == [0, 1, 2, 3, 4]


def test_a_kept_connection_that_the_server_has_closed_is_no_error() -> None:
    """The request is sent once more, on a new one."""
    with canned_server(stream(TEXT), [], stream(TEXT)) as server:
        result = load(server, count=2)

    assert not result.errors
    assert server.num_connections == 2


def test_no_more_are_in_flight_than_asked() -> None:
    """The others wait, and their clocks have not started."""
    with canned_server(*itertools.repeat(stream(*[TEXT] * 5), 8)) as server:
        result = load(server, count=8, max_concurrency=3)

    assert len(result.good) == 8
    assert server.max_in_flight == 3


def test_errors_are_told_and_the_rest_goes_on() -> None:
    """A refusal, an error in the stream, an end in the middle, an answer that is none."""
    refusal = stream(TEXT, status="400 Bad Request")
    failed = stream(TEXT, '{"error": {"message": "died"}}')
    torn = [*stream(TEXT, ends=False), b"garbage"]
    with canned_server(refusal, failed, torn, stream(), stream("nonsense"), stream(TEXT)) as server:
        result = load(server, count=6)

    assert [answer.error is None for answer in result.answers] == [*[False] * 5, True]
    assert result.errors[0].startswith("HTTP 400: ")
    assert "died" in result.errors[1]
    assert "without any text" in result.errors[3]
    assert "OpenAI" in result.errors[4]


def test_requests_are_sent_when_they_arrive() -> None:
    """None is early."""
    with canned_server(*itertools.repeat(stream(TEXT), 3)) as server:
        endpoint = Endpoint("127.0.0.1", server.port, "/v1/completions")
        began = time.perf_counter()
        result = run_load(endpoint, [{}] * 3, arrivals_s=[0.0, 0.03, 0.06])

    sent = [answer.sent_s - began for answer in result.answers]
    assert sent[1] >= 0.03
    assert sent[2] >= 0.06


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:9000", ("host", 9000, "/v1/completions", False)),
        ("https://host/prefix/", ("host", 443, "/prefix/v1/completions", True)),
        ("http://[::1]", ("::1", 80, "/v1/completions", False)),
        ("host:8000", ("host", 8000, "/v1/completions", False)),
    ],
)
def test_a_base_url_may_have_a_prefix(url: str, expected: tuple[str, int, str, bool]) -> None:
    """As behind a gateway."""
    endpoint = Endpoint.parse(url, "/v1/completions", {})

    assert (endpoint.host, endpoint.port, endpoint.path, endpoint.is_tls) == expected


@pytest.mark.parametrize("url", ["host:port", "ftp://host", "http://"])
def test_other_urls_are_refused(url: str) -> None:
    """In a line that shows one that works."""
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:8000"):
        Endpoint.parse(url, "/v1/completions", {})
