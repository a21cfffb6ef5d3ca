"""Bias, penalties and masks change logits as vLLM and OpenAI define them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from tests.helpers import plain_sampling
from workers import logit_edits
from workers.bad_words import BadWords
from workers.logit_edits import LogitEdits, TokenCounts

VOCAB = 50


def ids(token_ids: Sequence[int]) -> np.ndarray:
    return np.array(token_ids, np.int64)


def edited(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    num_padding: int = 0,
) -> tuple[list[float], list[float]]:
    """What the edits make of a row, and what the plain definition makes of it. With padding, rows
    lie apart."""
    whole = torch.linspace(-3, 3, VOCAB + num_padding).repeat(3, 1)
    logits, before = whole[:, :VOCAB], whole.clone()
    logit_edits.apply(logits, [(1, LogitEdits(params, VOCAB, ids(prompt), ids(output)))])
    assert torch.equal(logits[[0, 2]], before[[0, 2], :VOCAB])
    assert torch.equal(whole[:, VOCAB:], before[:, VOCAB:])
    before = before[:, :VOCAB]
    plain = plain_sampling.edit(before[1].double().numpy(), params, prompt, output)
    return logits[1].tolist(), plain.astype(np.float32).tolist()


CASES = {
    "bias": SamplingParams(logit_bias={3: 5.0, 49: -100.0}),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "weak repetition": SamplingParams(repetition_penalty=0.5),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.7),
    "negative": SamplingParams(presence_penalty=-2.0, frequency_penalty=-2.0),
    "allowed": SamplingParams(allowed_token_ids=(4, 40)),
    "bad words": SamplingParams(bad_words_token_ids=((7,), (4, 8), (4, 6, 9), (40, 4, 4, 6, 30))),
    "min_tokens": SamplingParams(min_tokens=9, eos_token_ids=(1, 2), stop_token_ids=(7,)),
    "all": SamplingParams(
        logit_bias={4: 3.0, 1: 2.0},
        allowed_token_ids=(1, 4, 6, 40),
        min_tokens=9,
        eos_token_ids=(1,),
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    ),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
@pytest.mark.parametrize("output", [(), (4,), (4, 40, 4, 4, 6)])
@pytest.mark.parametrize("num_padding", [0, 3])
def test_a_row_is_edited_by_the_plain_definition(
    params: SamplingParams, output: tuple[int, ...], num_padding: int
) -> None:
    """Every edit, alone and together, touches its row as defined and no other row; also where rows
    lie apart, as tensor ranks gather a vocabulary that they do not divide evenly."""
    found, expected = edited(params, (6, 6, 20, 48), output, num_padding)

    assert found == pytest.approx(expected, abs=1e-5)


def test_only_repetition_counts_the_prompt() -> None:
    """Presence and frequency look at the output alone, as in OpenAI's API."""
    prompt = (48,)
    unchanged, _ = edited(SamplingParams(presence_penalty=2.0, frequency_penalty=2.0), prompt)
    changed, _ = edited(SamplingParams(repetition_penalty=2.0), prompt)
    plain = torch.linspace(-3, 3, VOCAB).tolist()

    assert unchanged == plain
    assert changed[48] == pytest.approx(plain[48] / 2)


def test_every_end_token_is_masked_until_min_tokens_are_out() -> None:
    """All end and stop ids are barred, and only until then."""
    params = SamplingParams(min_tokens=2, eos_token_ids=(1, 106), stop_token_ids=(7,))
    early, _ = edited(
        SamplingParams(min_tokens=2, eos_token_ids=(1, 6), stop_token_ids=(7,)), output=(3,)
    )
    edits = LogitEdits(params, VOCAB, ids([]), ids([3]))
    edits.append(4)
    logits = torch.zeros(1, VOCAB)
    logit_edits.apply(logits, [(0, edits)])

    assert [i for i, value in enumerate(early) if value == -np.inf] == [1, 6, 7]
    assert logits.tolist() == [[0.0] * VOCAB]


def test_an_end_token_outside_the_vocabulary_harms_no_other_row() -> None:
    """A generation config may list ids that the model lacks."""
    params = SamplingParams(min_tokens=5, eos_token_ids=(1, VOCAB + 3))
    logits = torch.zeros(2, VOCAB)

    logit_edits.apply(logits, [(0, LogitEdits(params, VOCAB, ids([]), ids([])))])

    assert logits[0].isinf().nonzero().flatten().tolist() == [1]
    assert not logits[1].any()


def test_a_request_that_may_only_end_is_not_left_without_tokens() -> None:
    """`allowed_token_ids` wins over `min_tokens` where nothing else would remain."""
    params = SamplingParams(min_tokens=5, eos_token_ids=(1, 2), allowed_token_ids=(1,))
    logits = torch.zeros(1, VOCAB)

    logit_edits.apply(logits, [(0, LogitEdits(params, VOCAB, ids([]), ids([])))])

    assert logits[0].isfinite().nonzero().flatten().tolist() == [1]


def test_counts_that_grow_equal_counts_from_scratch() -> None:
    """Token by token gives what the whole output gives at once: preemption changes nothing."""
    output = np.random.default_rng(0).integers(0, 300, 1000)
    grown = TokenCounts(ids([5, 400]), ids([]))
    for token_id in output.tolist():
        grown.add(token_id)
    whole = TokenCounts(ids([5, 400]), output)

    def as_dict(counts: TokenCounts) -> dict[int, float]:
        return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))

    assert as_dict(grown) == as_dict(whole)
    assert as_dict(whole)[400] == 0.0


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 3), max_size=12),
)
def test_bad_words_token_by_token_are_the_plain_definition(
    words: list[list[int]], output: list[int]
) -> None:
    """Whether the output was there from the start (after a preemption) or came bit by bit."""
    sequences = [tuple(word) for word in words]
    whole = BadWords(sequences, ids(output))
    grown = BadWords(sequences, ids([]))
    for token_id in output:
        grown.append(token_id)

    plain = {
        w[-1] for w in sequences if len(w) <= len(output) + 1 and (*output, w[-1])[-len(w) :] == w
    }
    assert set(whole.banned().tolist()) == set(grown.banned().tolist()) == plain


@pytest.mark.parametrize(
    ("output", "left"),
    [((), [4, 5]), ((9,), [4, 5]), ((9, 9), [6])],
)
def test_bad_words_never_leave_nothing(output: tuple[int, ...], left: list[int]) -> None:
    """Where only bad words and the end are allowed, and the end not yet: what is allowed wins. Ids
    beyond the model ban nobody."""
    params = SamplingParams(
        allowed_token_ids=(4, 5, 6),
        bad_words_token_ids=((4,), (5,), (VOCAB + 3,), (VOCAB + 4, 6)),
        min_tokens=2,
        eos_token_ids=(6,),
    )
    logits = torch.zeros(2, VOCAB)

    logit_edits.apply(logits, [(0, LogitEdits(params, VOCAB, ids([]), ids(output)))])

    assert logits[0].isfinite().nonzero().flatten().tolist() == left
    assert not logits[1].any()


def test_usual_requests_want_no_edits() -> None:
    """Only requests that ask for something are looked at each step."""
    assert not LogitEdits.wanted_by(SamplingParams(temperature=0.5, top_p=0.9, eos_token_ids=(1,)))
    assert all(LogitEdits.wanted_by(params) for params in CASES.values())
