"""Bounds of sampling parameters: each violation names its field."""

import json
from typing import Any

import msgspec
import pytest

from engine.errors import InvalidRequestError
from engine.limits import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_SEED, MAX_STOP_TOKEN_IDS, MAX_TOKEN_ID
from engine.sampling_params import RepetitionDetection, SamplingParams

NAN, INF = float("nan"), float("inf")

# field, allowed ends of its range, just outside it
RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0.0, 100.0, 1], [-0.001, 100.001]),
    ("top_p", [1e-300, 1.0], [0.0, -0.1, 1.0001]),
    ("top_k", [-1, 0, MAX_TOKEN_ID], [-2, MAX_TOKEN_ID + 1]),
    ("min_p", [0.0, 1.0], [-0.001, 1.001]),
    ("seed", [-MAX_SEED - 1, 0, MAX_SEED, None], [MAX_SEED + 1, -MAX_SEED - 2, 10**400]),
    ("repetition_penalty", [0.01, 100.0], [0.0, -1.0, 100.1]),
    ("presence_penalty", [-2.0, 2.0], [-2.001, 2.001]),
    ("frequency_penalty", [-2.0, 2.0], [-2.001, 2.001]),
    ("max_tokens", [1, MAX_TOKEN_ID, None], [0, -1, MAX_TOKEN_ID + 1, 10**400]),
    ("min_tokens", [0, MAX_TOKEN_ID], [-1, MAX_TOKEN_ID + 1]),
    ("logprobs", [0, MAX_LOGPROBS, None], [-1, MAX_LOGPROBS + 1]),
    ("prompt_logprobs", [0, MAX_LOGPROBS, None], [-1, MAX_LOGPROBS + 1]),
    ("logit_bias", [{}, {0: -100.0}, {MAX_TOKEN_ID: 100.0}], [{-1: 0.0}, {1: 100.1}, {1: NAN}]),
    ("stop_token_ids", [(), (0, MAX_TOKEN_ID)], [(-1,), (MAX_TOKEN_ID + 1,)]),
    ("eos_token_ids", [(), (0, MAX_TOKEN_ID)], [(-1,), (MAX_TOKEN_ID + 1,)]),
    ("allowed_token_ids", [(5,), None], [(), (-1,), (MAX_TOKEN_ID + 1,)]),
]
INSIDE = [(field, value) for field, inside, _ in RANGES for value in inside]
OUTSIDE = [(field, value) for field, _, outside in RANGES for value in outside]
FLOATS = [field for field, inside, _ in RANGES if isinstance(inside[0], float)]


@pytest.mark.parametrize(("field", "value"), INSIDE, ids=lambda v: str(v)[:20])
def test_values_at_the_ends_of_a_range_are_allowed(field: str, value: Any) -> None:
    """Bounds are inclusive."""
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), OUTSIDE, ids=lambda v: str(v)[:20])
def test_values_outside_a_range_are_refused_by_name(field: str, value: Any) -> None:
    """The error names the field and is short, however long the value is."""
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})

    assert caught.value.param == field
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_no_number_in_json_is_refused(field: str, text: str) -> None:
    """Python's JSON reads all of these; 1e999 becomes infinity."""
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**{field: json.loads(text)})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("allowed_token_ids", tuple(range(MAX_LOGIT_BIAS + 1))),
    ],
)
def test_lists_have_a_longest_length(field: str, value: Any) -> None:
    """A request cannot make each step walk through a million entries."""
    with pytest.raises(InvalidRequestError, match=f"{field} takes at most"):
        SamplingParams(**{field: value})


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    """The two together would allow no length at all."""
    assert SamplingParams(min_tokens=4, max_tokens=4)
    with pytest.raises(InvalidRequestError, match=r"min_tokens \(5\) is above max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_pattern_size", (0, 1, 4)),
        ("max_pattern_size", (257, 1, 4)),
        ("min_pattern_size", (8, 0, 4)),
        ("min_pattern_size", (8, 9, 4)),
        ("min_count", (8, 1, 1)),
        ("min_count", (8, 1, 1001)),
    ],
)
def test_repetition_detection_is_bounded(field: str, values: tuple[int, int, int]) -> None:
    """Looking for patterns costs time each step: sizes and counts have limits."""
    with pytest.raises(InvalidRequestError, match=f"repetition_detection.{field}"):
        RepetitionDetection(*values)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_token_ids_of_another_vocabulary_are_refused(field: str) -> None:
    """The embedding's size decides, since the tokenizer may know fewer."""
    value: Any = {100: 1.0} if field == "logit_bias" else (100,)
    params = SamplingParams(**{field: value})

    params.check_vocabulary(101)
    with pytest.raises(InvalidRequestError, match=f"{field} holds token id 100.*end at 99"):
        params.check_vocabulary(100)


def test_greedy_is_temperature_zero_or_one_candidate() -> None:
    """Temperatures too small to divide by count as zero."""
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_bounds_hold_when_a_copy_is_changed() -> None:
    """`replace` checks as well, so the API server cannot fill in nonsense."""
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        msgspec.structs.replace(SamplingParams(), max_tokens=0)
