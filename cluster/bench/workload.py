"""What `raywire bench` asks a server or an `LLM` for, and when. Pure, and the same for a seed.

Random prompts are lists of token ids, all different, so that no cached prefix helps. A dataset is a
file of JSON lines, `{"prompt": …, "output_tokens": …}`, as vLLM's `custom` dataset has them.
"""

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Item:
    """One request, before it has the shape of an endpoint."""

    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids of random prompts: from `low` to below `high`."""

    low: int = 32
    high: int = 127
    """Single bytes in nearly every vocabulary, however small."""

    @classmethod
    def parse(cls, text: str) -> "TokenRange":
        """`32-127`: from 32 to below 127."""
        low, _, high = text.partition("-")
        if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
            raise ConfigError(f"--token-ids must be like 32-127, not {text}")
        return cls(int(low), int(high))


def random_items(
    count: int, input_len: int, output_len: int, ids: TokenRange, noise: random.Random
) -> list[Item]:
    return [
        Item(noise.choices(range(ids.low, ids.high), k=input_len), output_len) for _ in range(count)
    ]


def read_dataset(file: Path, output_len: int) -> list[Item]:
    """All lines of a dataset; `output_len` holds where a line names none.

    Raises:
        ConfigError: the file cannot be read, or a line is none of ours.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {file} cannot be read: {error}") from error
    items = [
        _item(line, number, output_len) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not items:
        raise ConfigError(f"--dataset {file} has no lines")
    return items


def _item(line: str, number: int, output_len: int) -> Item:
    try:
        row: dict[str, Any] = json.loads(line)
        prompt, output_tokens = row["prompt"], row.get("output_tokens", output_len)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"line {number} of the dataset is no object with a prompt") from error
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (prompt and (isinstance(prompt, str) or is_ids)):
        raise ConfigError(f"line {number} of the dataset: prompt is neither text nor token ids")
    if type(output_tokens) is not int or output_tokens < 1:
        raise ConfigError(f"line {number} of the dataset: output_tokens is {output_tokens!r}")
    return Item(prompt, output_tokens)


def take(items: list[Item], count: int) -> list[Item]:
    """So many, from the beginning again where a dataset has fewer."""
    return list(itertools.islice(itertools.cycle(items), count))


def arrivals_s(count: int, rate: float, noise: random.Random) -> list[float]:
    """Seconds from the start at which requests come: a Poisson process of `rate` a second.
    Infinity is all at once."""
    if rate <= 0 or math.isnan(rate):
        raise ConfigError(f"--request-rate must be positive or inf, not {rate}")
    return list(itertools.islice(_poisson(rate, noise), count))


def _poisson(rate: float, noise: random.Random) -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s  # the first at once: waiting for it would measure nothing
        now_s += 0.0 if math.isinf(rate) else noise.expovariate(rate)
