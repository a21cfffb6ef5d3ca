"""A request to /v1/responses with anything in any place: an answer, or an error that says why."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.http_server import HttpServer, serving
from tests.helpers.mutations import check_answer, mutations
from tests.helpers.responses import TEMPLATE, WEATHER

PATHS = ("/v1/responses", "/v1/responses/render", "/v1/responses/input_tokens")

BODY: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "id": "msg_1", "role": "user", "content": "hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "o", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "r"},
            ],
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "x"}],
        },
    ],
    "tools": [WEATHER],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "max_output_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.5,
    "stop": ["q"],
    "stream": False,
    "store": True,
    "background": False,
    "truncation": "auto",
    "metadata": {"a": "b"},
    "user": "u",
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
