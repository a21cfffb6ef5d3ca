"""A thought ends when its budget is used up, and only then is anything forced."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams, ThinkingBudget
from workers import logit_edits
from workers.logit_edits import LogitEdits
from workers.thought_limit import ThoughtLimit

START, END = (2, 3), 4


def forced_after(output: list[int], max_tokens: int = 2, *, is_open: bool = False) -> int | None:
    return ThoughtLimit(ThinkingBudget(max_tokens, START, END, is_open), output).forced


@pytest.mark.parametrize(
    ("output", "is_open", "forced"),
    [
        ([], False, None),
        ([], True, None),
        ([9, 9, 9], False, None),
        ([9], True, None),
        ([9, 9], True, END),
        ([9, 9, END], True, None),
        ([9, 9, END, 9, 9, 9], True, None),
        ([*START, 9], False, None),
        ([*START, 9, 9], False, END),
        ([2, 9, 3, 9, 9, 9], False, None),
        ([*START, END, 9, 9, 9, *START, 9, 9], False, END),
    ],
)
def test_end_is_forced_when_the_budget_is_used_up(
    output: list[int], is_open: bool, forced: int | None
) -> None:
    """Of each thought anew, and never outside of one."""
    assert forced_after(output, is_open=is_open) == forced


def test_budget_of_nothing_ends_a_thought_at_once() -> None:
    """Also one that the prompt has opened."""
    assert forced_after([], 0, is_open=True) == END
    assert forced_after([*START], 0) == END
    assert forced_after([2], 0) is None


@given(
    tokens=st.lists(st.sampled_from([2, 3, 4, 9]), max_size=60),
    max_tokens=st.integers(0, 5),
    is_open=st.booleans(),
)
def test_no_thought_is_longer_than_its_budget(
    tokens: list[int], max_tokens: int, is_open: bool
) -> None:
    """Whatever the model would say: forced tokens take the place of its own."""
    limit = ThoughtLimit(ThinkingBudget(max_tokens, START, END, is_open), [])
    output: list[int] = []
    for token in tokens:
        forced = limit.forced
        output.append(token if forced is None else forced)
        limit.append(output[-1])

    length: int | None = 0 if is_open else None
    for place, token in enumerate(output):
        if token == END:
            length = None
        elif length is not None:
            length += 1
            assert length <= max_tokens
        elif tuple(output[max(0, place - 1) : place + 1]) == START:
            length = 0


def test_forced_token_is_the_only_one_left() -> None:
    """Whatever else the request wants of its logits; other rows are not touched."""
    params = SamplingParams(
        thinking_budget=ThinkingBudget(1, START, END, True), logit_bias={END: -100.0}
    )
    edits = LogitEdits(params, 10, np.array([], np.int64), np.array([], np.int64))
    logits = torch.zeros(2, 10)
    logit_edits.apply(logits, [(0, edits)])
    assert logits[0].argmax() != END

    edits.append(9)
    logit_edits.apply(logits, [(0, edits)])

    assert logits[0].isfinite().nonzero().flatten().tolist() == [END]
    assert not logits[1].any()
    assert LogitEdits.wanted_by(params)
