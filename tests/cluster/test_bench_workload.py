"""What `raywire bench` asks for, and when."""

import itertools
import json
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.workload import (
    Item,
    TokenRange,
    arrivals_s,
    random_items,
    read_dataset,
    take,
)
from engine.errors import ConfigError


@given(seed=st.integers(), rate=st.floats(0.01, 1000), count=st.integers(1, 50))
def test_arrivals_are_those_of_their_seed(seed: int, rate: float, count: int) -> None:
    """The same again, in order, and more requests change nothing about the first ones."""
    times_s = arrivals_s(count, rate, random.Random(seed))

    assert times_s == arrivals_s(count + 10, rate, random.Random(seed))[:count]
    assert times_s[0] == 0
    assert times_s == sorted(times_s)


def test_gaps_are_those_of_a_poisson_process() -> None:
    """Exponential: mean and deviation are both 1 over the rate, and 37% are longer than that."""
    times_s = arrivals_s(20_001, 4.0, random.Random(0))
    gaps = [after - before for before, after in itertools.pairwise(times_s)]

    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.03)


def test_without_a_rate_all_come_at_once() -> None:
    """And a rate that means nothing is refused."""
    assert arrivals_s(3, math.inf, random.Random(0)) == [0.0, 0.0, 0.0]
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="--request-rate"):
            arrivals_s(3, rate, random.Random(0))


def test_random_prompts_are_all_different_and_within_range() -> None:
    """So no cached prefix helps, and no vocabulary is too small."""
    items = random_items(100, 16, 5, TokenRange(), random.Random(0))

    assert items == random_items(100, 16, 5, TokenRange(), random.Random(0))
    prompts = [tuple(item.prompt) for item in items]
    assert len(set(prompts)) == 100
    assert {len(prompt) for prompt in prompts} == {16}
    ids = {token for item in items if isinstance(item.prompt, list) for token in item.prompt}
    assert 32 <= min(ids) < max(ids) < 127
    assert {item.output_tokens for item in items} == {5}


@pytest.mark.parametrize("text", ["5", "5-", "9-5", "5-5", "a-b", "-1-5"])
def test_a_range_of_token_ids_has_two_ends(text: str) -> None:
    """In order."""
    assert TokenRange.parse("5-9") == TokenRange(5, 9)
    with pytest.raises(ConfigError, match="--token-ids"):
        TokenRange.parse(text)


def test_a_dataset_has_prompts_and_lengths(tmp_path: Path) -> None:
    """Texts or token ids; what says no length gets the flag's; used again from the beginning."""
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "hello", "output_tokens": 3}, {"prompt": [1, 2], "id": "more is ignored"}]
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")

    items = read_dataset(file, output_len=9)

    assert items == [Item("hello", 3), Item([1, 2], 9)]
    assert take(items, 3) == [Item("hello", 3), Item([1, 2], 9), Item("hello", 3)]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", "{}", '{"prompt": 1}', '{"prompt": ""}', '{"prompt": ["a"]}']
    + [f'{{"prompt": "a", "output_tokens": {wrong}}}' for wrong in ("0", "true", '"7"', "null")],
)
def test_a_line_that_cannot_work_is_named(line: str, tmp_path: Path) -> None:
    """By its number."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')

    with pytest.raises(ConfigError, match="line 2 of the dataset"):
        read_dataset(file, output_len=9)


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    """So is one that is no text."""
    file = tmp_path / "prompts.jsonl"
    for content in (b"\n", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="--dataset"):
            read_dataset(file, output_len=9)
