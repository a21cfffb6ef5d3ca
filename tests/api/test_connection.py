"""What a connection may have us keep before any route looks at it."""

import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api import connection, connection_book
from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, serving, wait_for

TIMEOUT_S = 20.0
LINES = b"x: " + b"y" * 1000 + b"\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving() as server:
        yield server


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)


def read_all(client: socket.socket) -> bytes:
    try:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))
    except ConnectionResetError:
        return b""


@pytest.mark.row("S-22")
@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /v1/models HTTP/1.1\r\n", LINES),
        (b"GET /v1/models HTTP/1.1\r\nx: ", b"y" * 1000),
        (b"GET /", b"y" * 1000),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", LINES),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;x=", b"y" * 1000),
    ],
    ids=["header lines", "one header line", "url", "trailers", "chunk extension"],
)
def test_head_that_does_not_end_is_refused(server: HttpServer, begin: bytes, more: bytes) -> None:
    """However it is cut into lines, a client cannot have us keep more than a bound."""
    with connect(server) as client, pytest.raises((BrokenPipeError, ConnectionResetError)):
        client.sendall(begin + more * 16_000)

    assert server.http.get("/live").status_code == 200


@pytest.mark.row("S-22")
def test_head_that_is_too_long_is_a_431(server: HttpServer) -> None:
    """In the shape of all errors; one that is just within the bound passes."""
    with connect(server) as client:
        client.sendall(b"GET /live HTTP/1.1\r\n" + LINES * 66)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"too_large"' in answer

    with connect(server) as client:
        client.sendall(b"GET /live HTTP/1.1\r\n" + LINES * 60 + b"connection: close\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


def test_what_is_no_http_is_a_400(server: HttpServer) -> None:
    """In the shape of all errors."""
    with connect(server) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(client)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"bad_http"' in answer


@pytest.mark.row("S-22", "F-32")
def test_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether nothing comes at all or a head stays unfinished."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    with serving() as server:
        for begin in (b"", b"GET /live HTTP/1.1\r\n"):
            with connect(server) as client:
                client.sendall(begin)
                assert read_all(client).startswith(b"HTTP/1.1 408 ")


@pytest.mark.row("F-49")
def test_one_connection_too_many_gets_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are there go on; once one of them has gone there is room again."""
    monkeypatch.setattr(connection_book, "MAX_CONNECTIONS", 2)
    with serving() as server:
        assert server.http.get("/live").status_code == 200  # a connection that stays
        with connect(server):
            with connect(server) as client:
                answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in answer
            assert server.http.get("/live").status_code == 200

        def is_let_in() -> bool:
            with connect(server) as client:
                client.sendall(b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n")
                return read_all(client).startswith(b"HTTP/1.1 200 ")

        wait_for(is_let_in)
        ended = 'raywire:connections_ended_total{model_name="m",reason="connections"}'
        assert server.metric(ended) >= 1


OFFERS = {
    "Java's": [b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c"],
    "curl's": [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c"],
    "a browser's": [b"Connection: keep-alive, Upgrade", b"Upgrade: websocket"],
    "in capitals": [b"CONNECTION:UPGRADE", b"UPGRADE:H2C"],
    "the other way round": [b"upgrade: h2c", b"connection: upgrade"],
    "of several": [b"connection: upgrade", b"upgrade: h2c , TLS/1.0", b"uPGRADE: websocket"],
}
PROMPT = b'{"model": "m", "prompt": "%b", "max_tokens": 1}'


def offering(offer: list[bytes], body: bytes, *lines: bytes) -> bytes:
    head = [b"POST /v1/completions HTTP/1.1", *offer, b"http2-settings: AAEAAEAAAAIAAAAA", *lines]
    length = b"content-length: %d" % len(body)
    return b"\r\n".join([*head, b"content-type: application/json", length, b"", body])


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS.keys())
def test_an_offer_of_another_protocol_is_ignored(server: HttpServer, offer: list[bytes]) -> None:
    """The first request of a connection has its answer, body and all, and so have a later one and
    one right behind another."""
    prompts = [b"a" * num for num in (1, 2, 3, 4)]
    first, second, third, last = (PROMPT % prompt for prompt in prompts)
    with connect(server) as client:
        client.sendall(offering(offer, first))
        answers = client.recv(1 << 16)
        client.sendall(offering(offer, second) + offering(offer, third))
        client.sendall(offering([], last, b"connection: close"))
        answers += read_all(client)

    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * 4
    counts = re.findall(rb'"prompt_tokens":(\d+)', answers)
    assert counts == [b"%d" % len(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("path", "status"), [(b"/v1/models", b"200"), (b"/ws", b"404"), (b"/v1/completions", b"405")]
)
def test_who_would_rather_have_a_web_socket_gets_the_page(
    server: HttpServer, path: bytes, status: bytes
) -> None:
    """Or hears that there is none, and may go on with the connection."""
    offer = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    with connect(server) as client:
        client.sendall(b"GET %b HTTP/1.1\r\n" % path + offer)
        client.sendall(b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert re.findall(rb"HTTP/1.1 (\d+)", read_all(client)) == [status, b"200"]


STREAM = b'{"model": "m", "prompt": "abc", "max_tokens": 900, "stream": true}'
SLOWLY = {"step_s": 0.05}
"""900 tokens would take longer than any test waits."""


def completion(body: bytes, version: bytes = b"1.1") -> bytes:
    return (
        b"POST /v1/completions HTTP/%b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % (version, len(body)) + body
    )


@pytest.mark.parametrize("queued", [b"", b"GET /live HTTP/1.1\r\n\r\n"])
def test_rubbish_behind_a_running_stream_ends_it_quietly(
    queued: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream is cut, not mixed with an answer to the rubbish; its request is aborted; and
    there is no traceback. Whether or not another request waits between the two."""
    with serving(endless_answer, engine_options=SLOWLY) as server, connect(server) as client:
        client.sendall(completion(STREAM))
        begin = client.recv(1 << 16)
        client.sendall(queued + b"\x16\x03\x01 hello\r\n\r\n")
        answer = begin + read_all(client)
        server.wait_idle()

    assert answer.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


def test_rubbish_right_behind_a_request_is_answered_quietly(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with a 400: the request before it finds its connection closed, without a traceback."""
    with connect(server) as client:
        client.sendall(b"GET /live HTTP/1.1\r\n\r\n\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(client)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


def test_a_client_that_leaves_aborts_what_runs_though_another_request_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not only the request that came last."""
    with serving(endless_answer, engine_options=SLOWLY) as server:
        with connect(server) as client:
            client.sendall(completion(STREAM) + b"GET /live HTTP/1.1\r\n\r\n")
            client.recv(1 << 16)
        server.wait_idle()

    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


def test_rubbish_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Its lines get rarer the more there is: 1, 2, 4, 8, …"""
    with serving() as server:
        for _ in range(20):
            with connect(server) as client:
                client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
                read_all(client)

    counts = [re.search(r"num_ended=(\d+)", record.getMessage()) for record in caplog.records]
    assert [found[1] for found in counts if found] == ["1", "2", "4", "8", "16"]


def test_a_stream_over_http_1_0_has_no_chunks(server: HttpServer) -> None:
    """That version knows none: the events come as they are, and the connection's end is theirs."""
    with connect(server) as client:
        client.sendall(completion(STREAM, b"1.0"))
        head, _, body = read_all(client).partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body.startswith(b"data: ")
    assert body.endswith(b"\n\ndata: [DONE]\n\n")


def test_an_answer_over_http_1_0_keeps_its_length(server: HttpServer) -> None:
    """As over 1.1."""
    with connect(server) as client:
        client.sendall(completion(STREAM.replace(b"true", b"false"), b"1.0"))
        head, _, body = read_all(client).partition(b"\r\n\r\n")

    assert b"content-length: %d" % len(body) in head.lower()


def test_a_client_that_leaves_after_a_long_body_is_noticed() -> None:
    """Reading is paused while a body is long, and must go on for its end to be seen."""
    padded = STREAM.replace(b"{", b'{"user": "%b", ' % (b"x" * 200_000), 1)
    with serving(endless_answer, engine_options=SLOWLY) as server:
        with connect(server) as client:
            client.sendall(completion(padded))
            assert client.recv(1 << 16)
        wait_for(lambda: server.engine.aborted, "the abort")


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


def answering() -> tuple[Any, Written, Any]:
    """A response's transport, what has left by it, and its request."""
    transport = Written()
    cycle = SimpleNamespace(transport=transport, response_started=False)
    return connection._HeadWithBody(cast(Any, cycle)), transport, cycle


def test_a_head_leaves_with_the_first_of_its_body() -> None:
    """One write, and the others as they come. What comes before the head does not wait."""
    response, transport, cycle = answering()

    response.write(b"100 Continue ")
    cycle.response_started = True
    for data in (b"head ", b"event ", b"event "):
        response.write(data)

    assert transport.writes == [b"100 Continue ", b"head event ", b"event "]


def test_a_head_without_a_body_leaves_when_the_connection_is_closed() -> None:
    """An application that fails between the two has answered, as far as its client can tell."""
    response, transport, cycle = answering()

    cycle.response_started = True
    response.write(b"head")
    response.close()

    assert transport.writes == [b"head"]
    assert transport.is_closed
