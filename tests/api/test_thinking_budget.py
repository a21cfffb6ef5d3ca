"""How long a model may think, from the request to what the engine is told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.sampling_params import ThinkingBudget
from tests.helpers.http_server import HttpServer, serving

THINK, END_THINK = 257, 258


def with_marks(folder: Path) -> Path:
    """The model folder, with thoughts that have tokens of their own."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    assert tokenizer.add_special_tokens(["<think>", "</think>"]) == 2
    tokenizer.save(file)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(reasoning_parser="qwen3", start=with_marks) as server:
        yield server


def budget_of(server: HttpServer, path: str, body: dict[str, Any]) -> ThinkingBudget | None:
    server.engine.received.clear()
    response = server.http.post(path, json={"max_tokens": 4} | body)
    assert response.status_code == 200, response.text
    [request] = server.engine.received
    assert request.sampling_params is not None
    return request.sampling_params.thinking_budget


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("a", False),
        ("a<think>b", True),
        ("a<think>b</think>c", False),
        ("a</think><think>", True),
        ([97, THINK, 98], True),
        ([THINK, END_THINK], False),
    ],
)
def test_budget_travels_as_the_models_marks(
    server: HttpServer, prompt: str | list[int], is_open: bool
) -> None:
    """With the tokens that open and end a thought, and whether the prompt has opened one."""
    found = budget_of(server, "/v1/completions", {"prompt": prompt, "thinking_token_budget": 7})

    assert found == ThinkingBudget(7, (THINK,), END_THINK, is_open)


def test_conversation_says_whether_its_answer_begins_with_a_thought(server: HttpServer) -> None:
    """As it does for telling thoughts from the rest."""
    open_end = {"role": "assistant", "content": "<think>so"}
    messages = [{"role": "user", "content": "x"}]

    for said, is_open in ((messages, False), ([*messages, open_end], True)):
        body = {"messages": said, "continue_final_message": is_open, "thinking_token_budget": 0}
        found = budget_of(server, "/v1/chat/completions", body)
        assert found is not None
        assert (found.max_tokens, found.is_open) == (0, is_open)


def test_anthropics_budget_is_the_same(server: HttpServer) -> None:
    """Where it can be kept; nothing is said to be ignored."""
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    thinking = {"type": "enabled", "budget_tokens": 7}

    found = budget_of(server, "/v1/messages", {**body, "thinking": thinking})
    response = server.http.post("/v1/messages", json={**body, "thinking": thinking})

    assert found == ThinkingBudget(7, (THINK,), END_THINK, False)
    assert "x-raywire-ignored" not in response.headers


@pytest.mark.parametrize("value", [None, -1])
def test_no_budget_is_none(server: HttpServer, value: int | None) -> None:
    """-1 is vLLM's way to say so."""
    body = {"prompt": "a", "thinking_token_budget": value}
    assert budget_of(server, "/v1/completions", body) is None


@pytest.mark.parametrize(("value", "words"), [(-2, "from 0"), (2**31, "from 0"), (1.5, "int")])
def test_bad_budget_is_refused(server: HttpServer, value: float, words: str) -> None:
    """By its name."""
    error = server.complete(prompt="x", thinking_token_budget=value).json()["error"]

    assert error["param"] == "thinking_token_budget"
    assert words in error["message"]


def test_thought_that_no_single_token_ends_cannot_be_bounded() -> None:
    """Forced letter by letter it might end in the middle of a word."""
    with serving(reasoning_parser="qwen3") as server:
        error = server.complete(prompt="x", thinking_token_budget=5).json()["error"]

    assert (error["code"], error["param"]) == ("unsupported_parameter", "thinking_token_budget")
    assert "</think>" in error["message"]
