"""When a request ends, and what is said about it."""

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import TOKEN_TYPE, Request
from engine.sampling_params import RepetitionDetection, SamplingParams
from engine.stop import finish_reason, is_repeating, stop_reason
from engine.wire import FinishReason

EOS, OTHER_EOS, STOP = 2, 3, 9


def end_of(output: list[int], **sampling: Any) -> tuple[FinishReason | None, int | None]:
    """Reason and stop reason of a request with a prompt of two tokens and that output."""
    sampling.setdefault("eos_token_ids", (EOS, OTHER_EOS))
    request = Request(
        "r",
        np.asarray([EOS, STOP], dtype="<u4"),
        SamplingParams(**sampling),
        max_model_len=10,
        block_size=4,
    )
    for token in output:
        request.append(token, b"")
    reason = finish_reason(request)
    return reason, stop_reason(request) if reason is FinishReason.STOP else None


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_each_end_token_of_the_model_stops(eos: int) -> None:
    """A model may have several; none of them is a stop reason, which is the client's word."""
    assert end_of([5]) == (None, None)
    assert end_of([5, eos]) == (FinishReason.STOP, None)


def test_a_stop_token_names_itself() -> None:
    """The client sees which of its stop tokens it was."""
    assert end_of([5, STOP], stop_token_ids=(8, STOP)) == (FinishReason.STOP, STOP)


def test_ignore_eos_leaves_the_clients_stop_tokens() -> None:
    """A07: exactly max_tokens with ignore_eos, unless the client has asked for that very token."""
    assert end_of([EOS], ignore_eos=True) == (None, None)
    assert end_of([EOS], ignore_eos=True, max_tokens=1) == (FinishReason.LENGTH, None)
    assert end_of([EOS], ignore_eos=True, stop_token_ids=(EOS,)) == (FinishReason.STOP, EOS)


def test_nothing_stops_before_min_tokens() -> None:
    """A06: neither end tokens nor stop tokens, of however many kinds."""
    for token in (EOS, OTHER_EOS, STOP):
        assert end_of([5, token], min_tokens=3, stop_token_ids=(STOP,)) == (None, None)
    assert end_of([5, 5, EOS], min_tokens=3) == (FinishReason.STOP, None)


def test_max_tokens_ends_with_length() -> None:
    """A stop token in the last place is still a stop."""
    assert end_of([5, 5], max_tokens=3) == (None, None)
    assert end_of([5, 5, 5], max_tokens=3) == (FinishReason.LENGTH, None)
    assert end_of([5, 5, EOS], max_tokens=3) == (FinishReason.STOP, None)


def test_the_models_length_ends_whatever_min_tokens_says() -> None:
    """No request outgrows its KV cache."""
    assert end_of([5] * 7, min_tokens=9) == (None, None)
    assert end_of([5] * 8, min_tokens=9) == (FinishReason.LENGTH, None)


def test_a_repeating_output_ends_with_repetition() -> None:
    """One pattern, min_count times in a row at the end; the prompt does not count."""
    detection = RepetitionDetection(max_pattern_size=2, min_count=3)
    assert end_of([5, 6, 5, 6, 5], repetition_detection=detection) == (None, None)
    assert end_of([5, 6, 5, 6, 5, 6], repetition_detection=detection)[0] is FinishReason.REPETITION
    assert end_of([7, 7, 7], repetition_detection=detection)[0] is FinishReason.REPETITION
    assert end_of([STOP, STOP], repetition_detection=detection) == (None, None)


class CountingArray(array):  # type: ignore[type-arg]
    """Counts the tokens that are read from it."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_looking_for_repetitions_does_not_read_the_whole_output() -> None:
    """32,768 tokens that repeat in every size but for one of the last: each size is given up at
    the first period that differs."""
    tokens = CountingArray(TOKEN_TYPE, [7] * 32768)
    tokens[-2] = 9
    assert not is_repeating(tokens, 0, RepetitionDetection(256, 2, 128))
    assert tokens.num_read < 256 * (256 + 10)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.integers(0, 4),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(2, 4),
)
def test_repetition_is_found_exactly_where_it_is(
    tokens: list[int], start: int, least: int, more: int, count: int
) -> None:
    """The quick search agrees with the definition, spelled out."""
    detection = RepetitionDetection(least + more, least, count)
    output = tokens[min(start, len(tokens)) :]
    expected = any(
        len(output) >= size * count and output[-size * count :] == output[-size:] * count
        for size in range(least, least + more + 1)
    )
    found = is_repeating(array(TOKEN_TYPE, tokens), len(tokens) - len(output), detection)
    assert found == expected
