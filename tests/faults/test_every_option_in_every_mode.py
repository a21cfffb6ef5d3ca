"""No combination of what a request may ask for and what an engine may be set to is a failure.

An engine that dies of one request takes all others with it, and what kills it is mostly two things
that nobody has tried together. So any two options are together in some request here, and each
request is sent to each engine; what an engine is set to does not change the answer.
"""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.pairwise import all_pairs
from tests.helpers.server import running_server
from tests.helpers.tiny_models import tiny_model
from tests.soak.answers import Answer
from tests.soak.cases import COMPLETIONS, Case
from tests.soak.exchange import Exchange, ask

pytestmark = pytest.mark.slow

MODES = {
    "as it comes": (),
    "whole prompts, no cached prefixes, two tensor ranks": (
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "1024"),
        *("--no-enable-prefix-caching", "-tp", "2"),
    ),
    "small chunks, two engines, nothing planned ahead": (
        *("--max-num-batched-tokens", "48", "--max-num-seqs", "16"),
        *("-dp", "2", "--no-async-scheduling"),
    ),
    "little cache, two stages": (
        *("--num-gpu-blocks-override", "66", "-pp", "2", "--max-num-seqs", "8"),
    ),
}

NONE: dict[str, Any] = {}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "temperature": [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 2.0, "seed": 2**40},
    ],
    "top_p": [NONE, {"top_p": 0.8}],
    "top_k": [NONE, {"top_k": 5}],
    "min_p": [NONE, {"min_p": 0.02}],
    "presence_penalty": [NONE, {"presence_penalty": 1.5}],
    "frequency_penalty": [NONE, {"frequency_penalty": -1.0}],
    "repetition_penalty": [NONE, {"repetition_penalty": 1.3}],
    "logit_bias": [NONE, {"logit_bias": {"70": 8, "71": -100}}],
    "allowed_token_ids": [NONE, {"allowed_token_ids": list(range(1, 350))}],
    "bad_words": [NONE, {"bad_words": ["a", "the"]}],
    "stop": [NONE, {"stop": ["e"]}, {"stop": ["i", "zz"], "include_stop_str_in_output": True}],
    "stop_token_ids": [NONE, {"stop_token_ids": [80, 81]}],
    "min_tokens": [NONE, {"min_tokens": 5}],
    "ignore_eos": [NONE, {"ignore_eos": True}],
    "logprobs": [NONE, {"logprobs": 0}, {"logprobs": 4}],
    "prompt_logprobs": [NONE, {"prompt_logprobs": 2}],
    "echo": [NONE, {"echo": True}],
    "n": [NONE, {"n": 3}],
    "structured": [
        NONE,
        {"structured_outputs": {"regex": "[a-z]{3}[0-9]*"}},
        {"structured_outputs": {"choice": ["one", "other"]}},
        {"response_format": {"type": "json_object"}},
    ],
    "repetition_detection": [
        NONE,
        {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
    ],
    "cache_salt": [NONE, {"cache_salt": "s"}],
    "prompt": [
        {"prompt": [5, 6, 7]},
        {"prompt": "The quick brown fox"},
        {"prompt": list(range(10, 210))},
        {"prompt": ["one", [9, 8, 7, 6]]},
    ],
    "stream": [NONE, {"stream": True}],
}

NUM_AT_ONCE = 8
ROUNDING = 1e-3
"""Of log probabilities: ranks add up in another order."""


@cache
def cases() -> tuple[Case, ...]:
    rows = all_pairs(OPTIONS)
    bodies = [
        {
            "model": "m",
            "max_tokens": 12,
            **{key: v for part in row.values() for key, v in part.items()},
        }
        for row in rows
    ]
    return tuple(Case(str(number), COMPLETIONS, body) for number, body in enumerate(bodies))


async def send_all(url: str) -> list[Exchange]:
    """All of them, several at a time."""
    room = asyncio.Semaphore(NUM_AT_ONCE)
    async with aiohttp.ClientSession() as session:

        async def send(case: Case) -> Exchange:
            async with room:
                return await ask(session, url, case, bool(case.body.get("stream")))

        return list(await asyncio.gather(*map(send, cases())))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """What the first mode has said."""
    return {}


@pytest.mark.row("S-32")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_no_two_options_are_a_failure_together(
    folder: Path, answers: dict[str, Answer], mode: str
) -> None:
    """An answer, the same in all modes, or a 400 that says what does not go together."""
    flags = ("--served-model-name", "m", "--dtype", "float32", "--block-size", "8", *MODES[mode])
    with running_server(str(folder), *flags) as server:
        exchanges = asyncio.run(send_all(server.url))

    for exchange in exchanges:
        assert exchange.end in ("whole", "refused"), (
            f"{exchange.end} {exchange.why} {exchange.case}"
        )
        if exchange.end == "whole":
            twin = answers.setdefault(exchange.case.name, exchange.answer)
            difference = exchange.answer.difference(twin, ROUNDING)
            assert difference is None, f"{difference}; {exchange.case}"
    num_whole = sum(exchange.end == "whole" for exchange in exchanges)
    assert num_whole >= 0.6 * len(exchanges)
