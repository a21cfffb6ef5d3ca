"""The requests of a soak run: a bit of everything that clients ask for, from a seed.

Whatever is drawn has a seed, so that each has one right answer: what the same server says to it
while nothing is wrong (its twin).
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Promise = Literal["answer", "end", "refusal"]
"""The twin's answer; any answer that is proper; a 4xx that names the mistake."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    path: str
    body: dict[str, Any] = field(hash=False)
    promise: Promise = "answer"

    @property
    def num_choices(self) -> int:
        prompt = self.body.get("prompt")
        n = int(self.body.get("n", 1))
        if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
            return n * len(prompt)
        return n


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"word": {"enum": ["ring", "block", "wave"]}},
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }
]

REFUSED: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": [10**6]},
    {"temperature": -1},
    {"max_tokens": 0},
    {"logit_bias": {"1000000": 1}},
    {"n": 10**9},
    {"model": "nobody"},
    {"allowed_token_ids": [-1]},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$ref": "#/y"}},
        }
    },
    {"stop": ["s"] * 1000},
]


def make_cases(seed: int, words: list[str], length: int, long_length: int) -> list[Case]:
    """All cases, in an order that means nothing.

    Args:
        seed: of the prompts and of everything that is drawn.
        words: prompts are made of these.
        length: tokens of an ordinary answer; a prompt has as many words, more or less.
        long_length: words of a long prompt.
    """
    draws = random.Random(f"cases {seed}")

    def text(num_words: int | None = None) -> str:
        return " ".join(draws.choices(words, k=num_words or draws.randint(8, max(8, length // 4))))

    def tokens() -> int:
        return draws.randint(length // 2, length)

    def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
        drawn = {"temperature": 2.0, "top_p": 0.98}
        yield "greedy", {}
        yield "greedy, usage as it grows", {"stream_options": {"continuous_usage_stats": True}}
        yield "long prompt", {"prompt": text(long_length), "max_tokens": 16}
        yield "long answer", {"prompt": text(length), "max_tokens": 3 * length}
        yield "seeded", {**drawn, "seed": draws.randrange(2**31)}
        yield (
            "seeded, top_k and min_p",
            {
                "temperature": 1.7,
                "top_k": 12,
                "min_p": 0.01,
                "seed": draws.randrange(2**31),
            },
        )
        yield "n = 3", {"n": 3, **drawn, "seed": draws.randrange(2**31)}
        yield "stop strings", {"stop": [draws.choice(words)[:3], "\n\n"]}
        yield (
            "stop string kept",
            {
                "stop": [draws.choice(words)[1:4]],
                "include_stop_str_in_output": True,
            },
        )
        yield (
            "penalties",
            {
                "presence_penalty": 1.5,
                "frequency_penalty": 0.7,
                "repetition_penalty": 1.3,
            },
        )
        yield (
            "penalties, seeded",
            {
                "frequency_penalty": 1.1,
                **drawn,
                "seed": draws.randrange(2**31),
            },
        )
        yield "min_tokens", {"min_tokens": length // 2, "stop": [" "]}
        yield "ends ignored", {"ignore_eos": True}
        yield "bias", {"logit_bias": {"97": 5, "98": -100, "99": 3}}
        yield "bad words", {"bad_words": [draws.choice(words)]}
        yield "choice", {"structured_outputs": {"choice": words[:5]}, "max_tokens": 40}
        yield (
            "regex",
            {
                "structured_outputs": {"regex": "[a-z]{2,30}: [0-9]{3}-[0-9]{4}"},
                **drawn,
                "seed": draws.randrange(2**31),
            },
        )
        yield (
            "schema",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
                },
                "max_tokens": 3 * length,
            },
        )

    cases = []
    for path in (COMPLETIONS, CHAT):
        is_chat = path == CHAT
        for name, given in bodies():
            body = {"model": "m", "temperature": 0, "max_tokens": tokens(), **given}
            prompt = body.pop("prompt", None) or text()
            if is_chat:
                body["messages"] = [{"role": "user", "content": prompt}]
            else:
                body["prompt"] = prompt
            cases.append(Case(f"{name} ({'chat' if is_chat else 'completion'})", path, body))
        logprobs = {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 3}
        body = {**cases[-1].body, "temperature": 0, "max_tokens": tokens(), **logprobs}
        del body["response_format"]
        cases.append(Case(f"log probabilities ({'chat' if is_chat else 'completion'})", path, body))
    chat = {"model": "m", "temperature": 0, "max_tokens": 2 * length}
    cases.append(
        Case(
            "tool that must be called",
            CHAT,
            {
                **chat,
                "messages": [{"role": "user", "content": text()}],
                "tools": TOOLS,
                "tool_choice": "required",
            },
        )
    )
    cases.append(
        Case(
            "drawn without a seed",
            COMPLETIONS,
            {"model": "m", "prompt": text(), "max_tokens": length, "temperature": 1.5},
            "end",
        )
    )
    plain = {"model": "m", "prompt": "x", "max_tokens": 8}
    cases += [
        Case(f"refused: {json.dumps(given)[:60]}", COMPLETIONS, {**plain, **given}, "refusal")
        for given in REFUSED
    ]
    return cases
