"""More requests than a server can take: some are served, the others are told at once when to come
back, and probes are answered all the while."""

import socket
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.limits import MAX_CONNECTIONS
from tests.helpers import burst
from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, serving, wait_for
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import running_server

ROUTES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 900},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900},
    "/v1/responses": {"input": "x", "max_output_tokens": 900},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900},
    "/invocations": {"prompt": "x", "max_tokens": 900},
}


@contextmanager
def full_server(**settings: Any) -> Iterator[HttpServer]:
    """A server at its limit of two, with an engine that has stopped for the moment."""
    settings = {"max_num_queued_reqs": 2, **settings}
    with serving(endless_answer, **settings) as server:
        server.engine.is_paused = True
        threads = [
            threading.Thread(
                target=lambda: server.complete(prompt="x", max_tokens=5), name=f"client {i}"
            )
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(server.engine.running) == 2, "two requests")
        try:
            yield server
        finally:
            server.engine.is_paused = False
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()


@pytest.mark.row("F-31")
def test_who_is_too_much_is_told_when_to_come_back_on_every_route() -> None:
    """503 `overloaded` in the shape of each API, with Retry-After, before the body has come."""
    with full_server() as server:
        for path, body in ROUTES.items():
            answer = server.http.post(path, json={"model": "m", **body})
            assert answer.status_code == 503, path
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            if path == "/v1/messages":
                assert error["type"] == "overloaded_error"
            else:
                assert (error["code"], error["type"]) == ("overloaded", "server_error")

        # Whatever else it is asked for, it answers.
        assert server.http.get("/v1/models").status_code == 200
        assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        refused = 'raywire:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"}'
        assert server.metric(refused) == len(ROUTES)
        assert len(server.engine.received) == 2


@pytest.mark.row("F-31")
def test_readiness_goes_while_load_is_shed_and_comes_back() -> None:
    """`/ready` says so, with the reason; the other probes are as ever."""
    with full_server() as server:
        answer = server.http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["status"] == "shedding"
        assert "2 requests are in flight" in answer.json()["reason"]
        assert "retry-after" in answer.headers
        for path in ("/health", "/live", "/ping"):
            assert server.http.get(path).status_code == 200

        server.engine.is_paused = False
        server.wait_ready()
        assert server.complete(prompt="x", max_tokens=1).status_code == 200


@pytest.mark.row("F-31")
def test_a_refusal_does_not_wait_for_a_body() -> None:
    """It comes before the body does, which may be long, and the connection may be used again."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    with (
        full_server() as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as client,
    ):
        client.sendall(head)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")

        client.sendall(b"x" * 1_000_000 + b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_request_beyond_the_limit_by_itself_is_a_400() -> None:
    """No retry would help."""
    with serving(max_num_queued_reqs=4) as server:
        answer = server.complete(prompt="x", n=5)
        assert answer.status_code == 400
        assert "--max-num-queued-reqs" in answer.json()["error"]["message"]
        assert server.complete(prompt="x", n=4).status_code == 200


def test_prompt_tokens_that_wait_are_bounded() -> None:
    """By their own limit, counted once for all continuations, and given back at the first token."""
    with serving(
        endless_answer, max_num_queued_tokens=100, engine_options={"step_s": 0.02}
    ) as server:
        server.engine.is_paused = True
        first = threading.Thread(
            target=lambda: server.complete(prompt="x" * 150, n=2, max_tokens=30)
        )
        first.start()
        wait_for(lambda: len(server.engine.running) == 2, "the first request")
        refused = server.complete(prompt="x")
        assert refused.status_code == 503
        assert "prompt tokens" in refused.json()["error"]["message"]

        server.engine.is_paused = False
        wait_for(lambda: server.engine.num_steps > 2, "first tokens")
        assert server.complete(prompt="x", max_tokens=1).status_code == 200
        first.join(20)


def test_sequences_that_end_in_any_way_give_their_places_back() -> None:
    """After answers, errors, and clients that leave."""
    with serving(endless_answer, max_num_queued_reqs=3) as server:
        for _ in range(3):
            assert server.complete(prompt="x", n=3, max_tokens=2).status_code == 200
            assert server.complete(prompt="x" * 2000).status_code == 400
            with server.http.stream(
                "POST", "/v1/completions", json={"prompt": "x", "n": 3, "stream": True}
            ) as stream:
                next(stream.iter_bytes())
            wait_for(lambda: not server.client.num_in_flight, "the abort")
        assert server.http.get("/ready").json()["status"] == "ready"


BODY = b'{"model": "m", "prompt": "x", "max_tokens": 20}'
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
)


def check(done: burst.Burst, count: int, most: int) -> None:
    """Everybody was answered: served whole, or told when to come back."""
    served, refused = done.of(200), done.of(503)
    # One connection too many is closed, perhaps before what it sends has come.
    num_cut = len(done.of(0))
    assert len(served) + len(refused) + num_cut == len(done.replies) == count
    assert num_cut <= max(0, count - MAX_CONNECTIONS)
    assert len(served) >= most
    assert all(b'"completion_tokens":20' in reply.raw for reply in served)
    assert all(1 <= (reply.retry_after_s or 0) <= 60 for reply in refused)
    assert {reply.status for reply in done.health} == {200}


@pytest.mark.row("F-31")
def test_of_five_hundred_at_once_those_that_fit_are_served() -> None:
    """The others have their answer long before, and so have probes."""
    with serving(endless_answer, max_num_queued_reqs=50, engine_options={"step_s": 0.1}) as server:
        done = burst.run(server.port, REQUEST, 500)
        check(done, 500, 50)
        assert len(done.of(200)) < 200
        assert median(done.of(503)) < median(done.of(200))
        assert median(done.health) < median(done.of(200))


def median(replies: list[burst.Reply]) -> float:
    """Of the seconds until something came."""
    return statistics.median(reply.first_byte_s for reply in replies)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.row("F-31")
def test_ten_thousand_at_once(tmp_path: Path) -> None:
    """A real server with its own defaults: 1,280 are served and 8,192 may connect; its memory is
    bounded, and in the end it is as before."""
    model = make_scripted_model(tmp_path, kind="cycle", token_ids=list(b"abc"), step_delay_s=0.01)
    with running_server(str(model), "--served-model-name", "m") as server:
        process = psutil.Process(server.raywire_processes()["RAYWIRE::APIServer_0"].pid)
        before = process.memory_info().rss
        done = burst.run(server.port, REQUEST, 10_000)
        check(done, 10_000, 1000)
        assert process.memory_info().rss - before < 512 << 20
        assert len(server.log) < 2_000_000

        wait_for(lambda: process.num_fds() < 100, "the end of connections")
        with server.http() as client:
            assert client.get("/ready").json()["status"] == "ready"
            assert client.post("/v1/completions", content=BODY).status_code == 200
