"""Errors tell clients nothing of the inside: no traceback, path, address, host, process id."""

import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api import errors
from engine.errors import InvalidRequestError, RequestFailedError
from tests.api.test_bad_input import BAD, UNSUPPORTED
from tests.api.test_structured_http import BAD_TOOLS, BROKEN
from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, serving, wait_for
from tests.helpers.mutations import mutations

INSIDE = re.compile(
    r"Traceback|File \"|line \d+, in |\.py\b|0x[0-9a-fA-F]{6,}|object at|<class |<function |"
    r"site-packages|127\.0\.0\.1|\[::1\]|ipc://|tcp://|\bpid\b|Errno|"
    + "|".join(re.escape(str(each)) for each in (Path.home(), Path.cwd(), tempfile.gettempdir()))
    + rf"|\b{re.escape(socket.gethostname())}\b|\b{os.getpid()}\b"
)
CAUSE = f'Worker pid={os.getpid()} exited: File "/srv/x.py", line 3, at 0x7f00deadbeef'

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "x"}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
RESPONSES = {
    "model": "m",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "previous_response_id": "resp_1",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x", "echo": True, "logprobs": 2, "stop": "y", "n": 2},
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/tokenize": {"model": "m", "prompt": "x", "add_special_tokens": True, "messages": None},
    "/detokenize": {"model": "m", "tokens": [1, 2], "a": 1},
    "/v1/chat/completions/render": CHAT,
}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving() as server:
        yield server


def _not_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def check(text: str) -> None:
    assert (found := INSIDE.search(text)) is None, (found, text[:500])


@pytest.mark.row("S-45", "S-53")
def test_no_refusal_of_the_corpus_shows_the_inside(server: HttpServer) -> None:
    """All bad requests of the other tests. What a client wrote it may see again, and they wrote
    nothing of the kind; nor is NaN an answer's JSON."""
    requests = [each[0] for each in BAD] + [each[0] for each in UNSUPPORTED]
    requests += [
        (path, json.dumps({"prompt": "x", **CHAT, **fields}).encode())
        for fields, _ in (*BROKEN, *BAD_TOOLS)
        for path in ("/v1/chat/completions", "/v1/completions")
    ]
    kind = {"content-type": "application/json"}
    answers = [server.http.post(path, content=body, headers=kind) for path, body in requests]
    refused = [answer for answer in answers if answer.status_code >= 400]
    assert len(refused) > 250
    for answer in refused:
        check(answer.text)
        json.loads(answer.text, parse_constant=_not_json)
        assert answer.status_code < 500


@pytest.mark.row("S-45")
@settings(max_examples=80)
@given(data=st.data())
def test_no_mutated_request_shows_the_inside(server: HttpServer, data: st.DataObject) -> None:
    """Anything in any place, on each kind of route."""
    path = data.draw(st.sampled_from(sorted(BODIES)))
    answer = server.http.post(path, json=data.draw(mutations(BODIES[path])))
    assert answer.status_code < 500
    if answer.status_code >= 400:
        check(answer.text)


@pytest.mark.row("S-45")
@pytest.mark.parametrize(
    ("method", "path", "headers", "body"),
    [
        ("GET", "/../../etc/passwd", {}, b""),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd%00", {}, b""),
        ("PUT", "/v1/models", {}, b""),
        ("POST", "/v1/completions", {"content-type": "multipart/form-data; boundary=x"}, b"--x--"),
        ("POST", "/v1/completions", {"content-encoding": "gzip"}, b"\x1f\x8b"),
        ("POST", "/v1/completions", {"content-type": "application/json"}, b"\x80\x04\x95"),
        ("GET", "/v1/responses/resp_1", {}, b""),
        ("GET", "/server_info?config_format=x", {}, b""),
        ("POST", "/v1/completions", {"x-data-parallel-rank": "9"}, b'{"prompt": "x"}'),
    ],
)
def test_no_refusal_of_http_shows_the_inside(
    server: HttpServer, method: str, path: str, headers: dict[str, str], body: bytes
) -> None:
    """Paths, methods, encodings, headers."""
    answer = server.http.request(method, path, headers=headers, content=body)
    assert 400 <= answer.status_code < 500
    check(answer.text)


@pytest.mark.row("S-45", "F-05")
def test_the_cause_of_a_death_is_for_the_log() -> None:
    """Before the first byte, in the middle of streams of three APIs, in the background, and on
    probes: clients hear that the engine is dead, and no more."""
    streams = {
        "/v1/completions": {"prompt": "x", "stream": True, "max_tokens": 900},
        "/v1/messages": {"messages": CHAT["messages"], "stream": True, "max_tokens": 900},
        "/v1/responses": {"input": "x", "stream": True},
    }
    slow = {"step_s": 0.02}
    with serving(endless_answer, engine_options=slow, dead_linger_s=3.0) as server:
        open_ = []
        for path, body in streams.items():
            request = server.http.build_request("POST", path, json={"model": "m", **body})
            open_.append(server.http.send(request, stream=True))
        wait_for(lambda: len(server.engine.running) == len(streams), "all streams")
        server.engine.die(CAUSE)
        texts = [each.read().decode() for each in open_]
        assert all("died" in text or "dead" in text for text in texts)
        for path in ("/live", "/ready", "/health", "/ping", "/v1/models"):
            answer = server.http.get(path)
            assert answer.status_code == 503
            texts.append(answer.text)
        texts.append(server.complete(prompt="x").text)
        for text in texts:
            check(text)
        assert server.join() == 1


@pytest.mark.row("S-45")
def test_addresses_of_objects_are_taken_out() -> None:
    """Whatever a library's exception says."""
    for error in (InvalidRequestError(CAUSE), RequestFailedError(CAUSE)):
        assert "0x…" in errors.describe(error).details.message
        assert "7f00deadbeef" not in errors.describe(error).body("/").decode()


@pytest.mark.row("S-07")
def test_no_route_takes_serialized_objects(server: HttpServer, tmp_path: Path) -> None:
    """A pickle that would write a file, as every kind of body, on every route that takes one: none
    is opened."""
    marker = tmp_path / "marker"
    hostile = b"cos\nsystem\n(S'touch %s'\ntR." % str(marker).encode()
    paths = [*BODIES, "/invocations", "/v1/messages/count_tokens", "/start_profile", "/nope"]
    kinds = ("application/json", "application/octet-stream", "application/x-pickle", "x/torch")
    for path in paths:
        for kind in kinds:
            answer = server.http.post(path, content=hostile, headers={"content-type": kind})
            assert 400 <= answer.status_code < 500
            check(answer.text)
    assert not marker.exists()
