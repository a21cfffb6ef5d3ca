"""Bad requests to Anthropic's routes: the right status, their shape, and the field's name."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.http_server import HttpServer, serving

TOOL = {"name": "f", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call>arguments #}"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE) as server:
        yield server
        # None of the requests below has reached the engine, and it serves the next one.
        assert server.engine.received == []
        assert post(server).json()["content"] == [{"type": "text", "text": "x"}]


def post(server: HttpServer, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], **fields}
    return server.http.post(path, json={k: v for k, v in body.items() if v != "absent"})


@pytest.mark.row("S-34")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": 7}, "model"),
        ({"max_tokens": "absent"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be from 1"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": "absent"}, "messages"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": "x"}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages has"),
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
        ({"system": 7}, "system must be a text"),
        ({"system": [{"type": "image"}]}, "system[0]: this server's model takes no images"),
        ({"temperature": -0.1}, "temperature must be from 0"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences takes at most 16"),
        ({"stop_sequences": ["x" * 257]}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"output_config": {"effort": 7}}, "output_config.effort"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": 7}}},
            "output_format.schema.type",
        ),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "below max_tokens (9)"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"tools": {}}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "name": "x" * 257}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "description": 7}]}, "tools[0].description"),
        ({"tools": [TOOL, SEARCH]}, "tools[1]: web_search_20250305 is a tool that Anthropic"),
        (
            {"tools": [TOOL, {"name": "g", "input_schema": {"type": 7}, "strict": True}]},
            "tools[1].input_schema.type must",
        ),
        (
            {"tools": [{**TOOL, "name": "f g"}], "tool_choice": {"type": "any"}},
            "tools[0].name: a name",
        ),
        ({"tools": [TOOL] * 1025}, "1025 tools"),
        ({"tools": [{**TOOL, "description": "x" * (1 << 20)}]}, "bytes long"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "no tool 'g'"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"container": "x"}, "container is not supported"),
    ],
)
def test_bad_requests_name_the_field(
    server: HttpServer, fields: dict[str, Any], words: str
) -> None:
    """In the message, where Anthropic has it."""
    response = post(server, **fields)

    check_shape(response, 400, "invalid_request_error")
    assert words in response.json()["error"]["message"]


def test_counting_refuses_the_same(server: HttpServer) -> None:
    """But knows nothing of sampling."""
    bad = post(server, "/v1/messages/count_tokens", tools=[SEARCH], max_tokens="absent")
    good = post(server, "/v1/messages/count_tokens", temperature=-1)

    check_shape(bad, 400, "invalid_request_error")
    assert good.json() == {"input_tokens": 1}
    assert good.headers["x-raywire-ignored"] == "max_tokens,temperature"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/v1/messages", "{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", "[]", 400, "invalid_request_error"),
        ("POST", "/v1/messages", '{"temperature": NaN}', 400, "invalid_request_error"),
        ("POST", "/v1/messages", "x" * (9 << 20), 413, "request_too_large"),
        ("GET", "/v1/messages", "", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", "{}", 404, "not_found_error"),
    ],
)
def test_other_errors_have_the_shape_too(
    server: HttpServer, method: str, path: str, body: str, status: int, kind: str
) -> None:
    """Wherever they come from."""
    headers = {"content-type": "application/json"}
    response = server.http.request(method, path, content=body, headers=headers)

    check_shape(response, status, kind)


@pytest.mark.parametrize(
    ("num_chars", "words"),
    [
        (1000, "prompt is too long: 1000 tokens > 999 maximum"),
        (400_000, "prompt is too long: this model's maximum context length is 1000 tokens"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_in_their_words(
    server: HttpServer, num_chars: int, words: str
) -> None:
    """Agents look for them, and shorten the conversation by what is too much."""
    response = post(server, messages=[{"role": "user", "content": "x" * num_chars}])

    check_shape(response, 400, "invalid_request_error")
    assert response.json()["error"]["message"].startswith(words)


def test_no_such_model(server: HttpServer) -> None:
    """A 404, as from Anthropic."""
    response = post(server, model="claude-opus")

    check_shape(response, 404, "not_found_error")
    assert "claude-opus" in response.json()["error"]["message"]


def test_a_server_that_is_not_there_yet_says_so() -> None:
    """In their shape, and when to come again."""
    with serving(waits_until_ready=False, engine_options={"is_ready": False}) as server:
        response = post(server)

    check_shape(response, 503, "overloaded_error")
    assert "retry-after" in response.headers


def check_shape(response: httpx.Response, status: int, kind: str) -> None:
    assert response.status_code == status, response.text
    body = json.loads(response.text)
    assert list(body) == ["type", "error", "request_id"]
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert list(body["error"]) == ["type", "message"]
    assert 0 < len(body["error"]["message"]) < 300
