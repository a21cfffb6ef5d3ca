"""How streams end: once, however they end, and however their clients do."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from engine.wire import EngineCoreRequest, FinishReason
from tests.helpers.byte_folder import END
from tests.helpers.fake_engine import endless_answer, text_as_answer
from tests.helpers.http_server import TIMEOUT_S, HttpServer, serving, wait_for

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
DONE = "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving(tool_call_parser="hermes") as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    shared.engine.answer = by_prompt
    return shared


def by_prompt(request: EngineCoreRequest) -> list[int | FinishReason]:
    """What the prompt's words ask for."""
    assert request.prompt_token_ids is not None
    prompt = bytes(i for i in request.prompt_token_ids.tolist() if i < 256).decode()
    if "call" in prompt:
        return [*CALL.encode(), END]
    if "broken" in prompt:
        return [*CALL[:-20].encode(), END]
    if "fail" in prompt:
        return [*b"so far", FinishReason.ERROR]
    return [*"漢 and more text, STOP and so on".encode(), END]


MIXED: list[tuple[dict[str, Any], str]] = [
    ({"content": "say"}, "stop"),
    ({"content": "say", "max_tokens": 9}, "length"),
    ({"content": "say", "stop": ["STOP"]}, "stop"),
    ({"content": "say", "n": 3, "max_tokens": 5}, "length"),
    ({"content": "call", "tools": TOOLS}, "tool_calls"),
    ({"content": "call", "tools": TOOLS, "max_tokens": 30}, "length"),
    ({"content": "broken", "tools": TOOLS}, "tool_calls"),
    ({"content": "say", "logprobs": True, "top_logprobs": 2}, "stop"),
]


def test_two_hundred_streams_end_once_each(server: HttpServer) -> None:
    """With a stop, at the limit, with a call, whole or broken: one finish reason for each choice,
    the usage, and then [DONE], as the last line and once."""

    def ask(each: tuple[dict[str, Any], str]) -> httpx.Response:
        return server.chat(**each[0], stream=True, stream_options={"include_usage": True})

    with ThreadPoolExecutor(16) as pool:
        asked = [MIXED[i % len(MIXED)] for i in range(200)]
        answers = list(pool.map(ask, asked))

    for (fields, reason), answer in zip(asked, answers, strict=True):
        assert answer.text.count("[DONE]") == 1
        assert answer.text.endswith(DONE)
        *chunks, usage = data_of(answer)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ends = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
        assert ends == [reason] * fields.get("n", 1)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] > 0
    server.wait_idle()


def data_of(answer: httpx.Response) -> list[Any]:
    """Each event is strict UTF-8 and JSON."""
    lines = answer.content.decode("utf-8", "strict").removesuffix(DONE).split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def test_a_stream_that_fails_ends_with_one_error(server: HttpServer) -> None:
    """Behind what came before it; nothing pretends that the answer is whole."""
    answer = server.chat("fail", stream=True)

    *chunks, last = data_of(answer)
    assert "error" in last
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * len(chunks)
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("rest", ["", " and on"])
def test_half_a_character_is_shown_once_it_cannot_become_whole(
    server: HttpServer, rest: str
) -> None:
    """As one mark: before the text that follows it, or at the end."""
    half = "漢".encode()[:2]
    server.engine.answer = lambda _: [*b"ok ", *half, *rest.encode(), END]

    chunks = data_of(server.complete(prompt="x", stream=True))

    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == f"ok \ufffd{rest}"
    assert "" not in texts[:-1]


def test_leaving_at_the_last_moment_harms_nothing(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    """500 clients close when the last chunk is due: nothing runs on, nothing is counted as running
    and no error is logged."""
    caplog.set_level(logging.WARNING)
    server.engine.answer = text_as_answer("abc")
    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + body

    for number in range(500):
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as client:
            client.sendall(request)
            seen, num_events = b"", number % 4
            while seen.count(b"data: ") < num_events and b"[DONE]" not in seen:
                seen += client.recv(65536)

    server.wait_idle()
    assert server.metric('raywire:num_requests_running{engine="0",model_name="m"}') == 0
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert server.complete(prompt="x").json()["choices"][0]["text"] == "abc"


def test_a_death_under_many_requests_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """200 streams are cut off at once: each client is told, and the log is not flooded."""
    body = json.dumps({"model": "m", "prompt": "x", "stream": True, "max_tokens": 900}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + body
    with ExitStack() as stack, serving(endless_answer, engine_options={"step_s": 0.01}) as server:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S))
            for _ in range(200)
        ]
        for client in clients:
            client.sendall(request)
        wait_for(lambda: len(server.engine.running) == 200, "200 running requests")
        caplog.clear()

        server.engine.die("worker 0 was killed")

        for client in clients:
            answer = b"".join(iter(lambda: client.recv(65536), b""))  # noqa: B023  # used at once
            assert answer.count(b'"code":"engine_dead"') == 1
        assert server.join() == 1
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(records) <= 3, [record.getMessage() for record in records]
    assert not any(record.exc_info for record in caplog.records)


def test_health_is_that_of_the_path_of_requests(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is stuck with a request does not say that it is well."""
    is_stuck, is_free = threading.Event(), threading.Event()

    def get_stuck(*args: object, **options: object) -> list[str]:
        is_stuck.set()
        is_free.wait(TIMEOUT_S)
        return ["x"]

    monkeypatch.setattr("api.prompts.read", get_stuck)
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(server.complete, prompt="x")
        assert is_stuck.wait(TIMEOUT_S)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=0.3)
        is_free.set()
        assert stuck.result(TIMEOUT_S).status_code == 200
    assert server.http.get("/health").status_code == 200
