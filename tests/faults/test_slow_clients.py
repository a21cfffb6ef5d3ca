"""Clients that read or send slowly, or not at all: they slow nobody but themselves, what is kept
for them is bounded, and in the end they are cut off."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from api import connection
from api.request_stream import _MAX_WAITING, RequestStream
from engine.codec import pack_tokens
from engine.wire import EngineCoreOutput, FinishReason
from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, serving, wait_for

TIMEOUT_S = 20.0
NAME = "m" * 4000
"""It is in every event, so that few of them fill a connection."""

CUT = 'raywire:connections_ended_total{model_name="m",reason="send_timeout"}'


def connect(server: HttpServer, receive_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    client.settimeout(TIMEOUT_S)
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(("127.0.0.1", server.port))
    return client


def post(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


@contextmanager
def unread_stream(
    server: HttpServer, receive_bytes: int = 2048, **fields: object
) -> Iterator[socket.socket]:
    """A stream of which nothing is read so far."""
    with connect(server, receive_bytes) as client:
        body = {"model": NAME, "prompt": "x", "max_tokens": 900, "stream": True, **fields}
        client.sendall(post(body))
        yield client


@pytest.mark.parametrize("n", [1, 4])
def test_who_does_not_read_is_cut_off_and_others_are_not_held_up(
    n: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After --send-timeout its request is aborted, with one line in the log; a neighbour's stream
    is as ever meanwhile."""
    with serving(
        endless_answer,
        engine_options={"step_s": 0.002, "max_model_len": 100_000},
        served_model_names=("m", NAME),
        send_timeout_s=0.5,
    ) as server:
        with unread_stream(server, n=n, max_tokens=50_000):
            wait_for(lambda: len(server.engine.running) == n, "the stream")
            began = time.monotonic()
            assert server.complete(model=NAME, prompt="x", max_tokens=20).status_code == 200
            assert time.monotonic() - began < 5.0
            wait_for(lambda: len(server.engine.aborted) == n, "the abort")
        server.wait_idle()
        assert server.metric(CUT) == 1
    [line] = [r.getMessage() for r in caplog.records if "send_timeout" in r.getMessage()]
    assert "have not been read for 0.5 s" in line
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.slow
def test_an_answer_that_is_whole_and_unread_ends_its_connection() -> None:
    """It costs the engine nothing more, but a connection and the answer's memory, for ever."""
    options = {"max_model_len": 3_000_000}
    with (
        serving(send_timeout_s=0.3, engine_options=options) as server,
        connect(server, 2048) as client,
    ):
        client.sendall(post({"model": "m", "prompt": "x" * 2_000_000}, "/tokenize"))
        wait_for(lambda: server.metric(CUT) == 1, "the cut")


def test_who_reads_slowly_but_reads_is_left_alone() -> None:
    """The time counts anew whenever it has caught up."""
    with serving(
        endless_answer,
        engine_options={"step_s": 0.001},
        served_model_names=("m", NAME),
        send_timeout_s=1.0,
    ) as server:
        with unread_stream(server, 1 << 14, max_tokens=900) as client:
            text, began = b"", time.monotonic()
            while b"[DONE]" not in text[-100:]:
                time.sleep(0.005)  # a slow reader is what is tested
                text += client.recv(1 << 14)
            assert time.monotonic() - began > 1.0
        assert server.metric(CUT) == 0


def test_outputs_that_nobody_takes_are_merged() -> None:
    """A thousand steps are a few objects; nothing of them is lost, and the end is the end."""
    stream = RequestStream("r", lambda _: None)
    for step in range(1000):
        reason = FinishReason.LENGTH if step == 999 else None
        stream.push(EngineCoreOutput("r", pack_tokens([step % 256]), reason), float(step))
        assert len(stream._waiting) <= _MAX_WAITING

    output = stream.take()

    assert output is not None
    assert output.new_token_ids == pack_tokens([step % 256 for step in range(1000)])
    assert output.finish_reason is FinishReason.LENGTH
    assert stream.is_finished


# ------------------------------------------------------------------------- those who send slowly


@pytest.mark.slow
@pytest.mark.row("F-32", "S-22")
def test_five_hundred_slow_senders_are_cut_and_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads and bodies that come a byte at a time: normal clients do not notice, and in the end the
    slow ones have a 408."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 2.0)
    with serving(body_timeout_s=2.0) as server, ExitStack() as stack:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n"
        clients = [stack.enter_context(connect(server)) for _ in range(500)]
        for number, client in enumerate(clients):
            client.sendall(head if number % 2 else head + b"\r\n")
        slowest = 0.0
        ended: set[socket.socket] = set()
        began = time.monotonic()
        while len(ended) < len(clients):
            assert time.monotonic() - began < 3 * TIMEOUT_S
            for client in clients:
                if client not in ended and not drip(client):
                    ended.add(client)
            asked = time.monotonic()
            assert server.complete(prompt="x", max_tokens=1).status_code == 200
            slowest = max(slowest, time.monotonic() - asked)
        assert slowest < 5.0
        answers = {client.recv(1 << 12)[:13] for client in clients}
        assert answers <= {b"HTTP/1.1 408 ", b""}
        assert b"HTTP/1.1 408 " in answers


def drip(client: socket.socket) -> bool:
    """One more byte. Returns whether the server still listens."""
    client.setblocking(False)
    try:
        client.send(b"x")
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        client.settimeout(TIMEOUT_S)
    return False


@pytest.mark.row("F-32")
def test_a_body_that_drips_comes_to_an_end() -> None:
    """However steadily: what is slower than a modem of old is no client."""
    with serving(body_timeout_s=0.5) as server, connect(server) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
        )
        began = time.monotonic()
        while drip(client):
            assert time.monotonic() - began < TIMEOUT_S
            time.sleep(0.02)  # slower than the timeout would be a client that sends nothing
        assert client.recv(1 << 12).startswith(b"HTTP/1.1 408 ")


@pytest.mark.row("F-32")
def test_the_rest_of_a_body_that_nobody_wants_is_not_read_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer, a 404 here, is out; what still drips has as long as a head has."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    with serving() as server, connect(server) as client:
        client.sendall(b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        assert client.recv(1 << 12).startswith(b"HTTP/1.1 404 ")
        began = time.monotonic()
        while drip(client):
            assert time.monotonic() - began < TIMEOUT_S
            time.sleep(0.02)
