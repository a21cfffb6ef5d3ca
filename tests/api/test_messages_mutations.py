"""A request to /v1/messages with anything in any place: an answer, or an error that says why."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.anthropic_stream import TEMPLATE
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.mutations import check_answer, mutations

PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render")

BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "x"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "r"}],
                    "is_error": False,
                }
            ],
        },
        {"role": "system", "content": "s"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "pre"},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["q"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "stream": False,
    "metadata": {"user_id": "u"},
    "cache_salt": "s",
    "chat_template_kwargs": {"a": 1},
}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE, reasoning_parser="auto") as server:
        yield server


@settings(max_examples=50)
@given(body=mutations(BODY), path=st.sampled_from(PATHS))
def test_nothing_that_a_body_may_hold_is_our_fault(
    server: HttpServer, body: dict[str, Any], path: str
) -> None:
    """Never a 5xx; and a refusal has words."""
    check_answer(server.http.post(path, json=body))


def test_the_body_itself_is_good(server: HttpServer) -> None:
    """Or nothing above would be shown."""
    for path in PATHS:
        assert server.http.post(path, json=BODY).status_code == 200
