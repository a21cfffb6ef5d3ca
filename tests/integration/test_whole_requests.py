"""What a request may count on through the whole system: end tokens, cached prefixes, odd sampling
parameters, log probabilities. On the scripted model, whose sampler is the real one."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.server import Server, running_server
from tests.helpers.streams import read_events

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The echo: an answer is the prompt, token by token, then its end."""
    flags = ("--served-model-name", "m", "--block-size", str(BLOCK_SIZE))
    with running_server("scripted", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return post(client, "/v1/completions", {"prompt": "x", **fields})


def chat(client: httpx.Client, content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return post(client, "/v1/chat/completions", {"messages": messages, **fields})


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json={"model": "m", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = json.loads(response.text, parse_constant=refuse_constant)
    return answer


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def streamed_usage(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "m", "temperature": 0, **body, **options}
    with client.stream("POST", path, json=body) as response:
        *_, last = read_events(response)
    usage: dict[str, Any] = last["usage"]
    return usage


@pytest.mark.parametrize("which", ["the model's own", "the client's"])
def test_no_end_token_comes_before_min_tokens(
    server: Server, client: httpx.Client, which: str
) -> None:
    """Neither of them, however much it is wished for (A06)."""
    end, other = end_token(client), ord("q")
    wished = end if which == "the model's own" else other

    answer = complete(
        client,
        min_tokens=10,
        max_tokens=20,
        stop_token_ids=[other],
        logit_bias={str(wished): 100},
        return_token_ids=True,
    )

    [choice] = answer["choices"]
    assert not {end, other} & set(choice["token_ids"][:10])
    assert choice["token_ids"][10:] == [wished]
    assert choice["stop_reason"] == (other if wished == other else None)


def end_token(client: httpx.Client) -> int:
    answer = complete(client, return_token_ids=True)
    token_id: int = answer["choices"][0]["token_ids"][-1]
    return token_id


def test_ignored_ends_end_no_chat(client: httpx.Client) -> None:
    """So many tokens as asked for, though the model ends its answer again and again; a stop string
    ends it all the same (A07)."""
    endless = chat(client, "hello", ignore_eos=True, max_tokens=200)
    stopped = chat(client, "hello", ignore_eos=True, max_tokens=200, stop="lo")

    assert endless["usage"]["completion_tokens"] == 200
    assert endless["choices"][0]["finish_reason"] == "length"
    assert stopped["choices"][0]["stop_reason"] == "lo"


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_usage_tells_what_was_cached(client: httpx.Client, route: str) -> None:
    """Nothing of a new prompt, then whole blocks but never all of it; the same in a stream, with
    `n`, and `prompt_tokens` stays what it is (B04)."""
    path, text = f"/v1/{route}", f"{route}: " + "x" * 600
    body: dict[str, Any] = {"max_tokens": 2, "prompt": text}
    if route.startswith("chat"):
        body = {"max_tokens": 2, "messages": [{"role": "user", "content": text}]}

    first = post(client, path, body)["usage"]
    again = post(client, path, body)["usage"]
    with_n = post(client, path, {**body, "n": 3})["usage"]
    streamed = streamed_usage(client, path, body)

    num_prompt = first["prompt_tokens"]
    cached = (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_prompt > 600
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["prompt_tokens_details"] == {"cached_tokens": cached}
    assert streamed == again
    assert with_n["prompt_tokens"] == again["prompt_tokens"] == num_prompt
    assert with_n["prompt_tokens_details"] == {"cached_tokens": cached}
    assert with_n["completion_tokens"] == 6


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-7},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_p": 1e-4},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0, "top_k": 1, "repetition_penalty": 1.3, "presence_penalty": 2},
        {"temperature": 0, "top_p": 0.1, "min_p": 0.9, "frequency_penalty": -2, "seed": 7},
    ],
)
def test_narrow_sampling_is_greedy(client: httpx.Client, params: dict[str, Any]) -> None:
    """Neither empty nor different each time, whatever else is asked for (C10, C12)."""
    answers = [complete(client, prompt="every word", **params)["choices"][0] for _ in range(2)]

    assert answers[0]["text"] == answers[1]["text"] == "every word"


def test_tokens_that_cannot_be_drawn_have_finite_logprobs(client: httpx.Client) -> None:
    """The answer is JSON, and its values are the model's own, before any mask (D04)."""
    allowed = [ord("a"), ord("b")]

    answer = complete(client, prompt="cc", logprobs=5, allowed_token_ids=allowed, max_tokens=3)

    logprobs = answer["choices"][0]["logprobs"]
    assert set(answer["choices"][0]["text"]) <= {"a", "b"}
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"])
    assert all(max(top, key=top.__getitem__) == "c" for top in logprobs["top_logprobs"][:2])


def test_logprobs_of_a_prompt_do_not_depend_on_how_tokens_are_drawn(client: httpx.Client) -> None:
    """`echo` with `top_k` 1: raw values of the model, the same as without (D05)."""
    fields = {"prompt": "some prompt", "echo": True, "logprobs": 1, "max_tokens": 1}

    plain = complete(client, **fields)["choices"][0]["logprobs"]
    cut = complete(client, **fields, top_k=1, top_p=0.5)["choices"][0]["logprobs"]
    drawn = complete(client, **fields | {"temperature": 1, "top_k": 1})["choices"][0]["logprobs"]

    assert plain == cut == drawn
    assert plain["token_logprobs"][0] is None
    assert all(math.isfinite(value) for value in plain["token_logprobs"][1:])


def test_streamed_logprobs_of_an_echo_are_the_plain_ones(client: httpx.Client) -> None:
    """Offsets go on from chunk to chunk (D03)."""
    fields = {"prompt": "Grüße, 世界", "echo": True, "logprobs": 2, "max_tokens": 40}
    [plain] = complete(client, **fields)["choices"]

    body = {"model": "m", "temperature": 0, **fields, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        chunks = [event["choices"][0] for event in read_events(response)]

    assert "".join(chunk["text"] for chunk in chunks) == plain["text"] == "Grüße, 世界" * 2
    for name, values in plain["logprobs"].items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values


def test_seeds_decide_what_is_drawn(client: httpx.Client) -> None:
    """Seed 42 twice is the same, also beside others; 43 is not (C02)."""
    drawn = {"temperature": 50, "max_tokens": 64, "ignore_eos": True}
    first, again, other = (
        complete(client, seed=seed, **drawn)["choices"][0]["text"] for seed in (42, 42, 43)
    )
    among = complete(client, prompt=["a", "x", "b"], seed=42, **drawn)["choices"][1]["text"]

    assert first == again == among
    assert first != other
