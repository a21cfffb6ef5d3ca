"""Beam search over computed models: what goes on, what is best."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.beams import Beam, BeamSet, joined_logprobs
from engine.codec import unpack_tokens
from engine.wire import FinishReason, Logprobs

VOCAB = 12
EOS, STOP = 0, 1


def model(seed: int, prefix: Sequence[int]) -> list[float]:
    """Log probabilities behind a prefix, the same each time; no two of them are equal."""
    values = np.random.default_rng([seed, *prefix]).normal(size=VOCAB)
    return [float(v) for v in values - math.log(np.exp(values).sum())]


def row(values: Sequence[float], k: int) -> Logprobs:
    """What the engine tells of them: its own choice, which is the best, then the `k` best."""
    order = sorted(range(len(values)), key=lambda i: -values[i])[:k]
    token_ids = [order[0], *order]
    return Logprobs(
        np.array([token_ids], "<u4"),
        np.array([[values[i] for i in token_ids]], "<f4"),
        np.ones(1, "<u4"),
    )


def search(seed: int, beams: BeamSet, width: int) -> list[Beam]:
    while beams.alive:
        rows = [row(model(seed, unpack_tokens(b.tokens)), 2 * width) for b in beams.alive]
        beams.advance(rows)
    return beams.best()


def plain_search(
    seed: int, width: int, max_tokens: int, num_prompt_tokens: int, penalty: float
) -> list[tuple[list[int], FinishReason]]:
    """The definition: all steps are made, and all that has come up is compared at the end."""
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int], FinishReason]] = []
    for _ in range(max_tokens):
        longer = []
        for total, tokens in alive:
            values = [float(np.float32(v)) for v in model(seed, tokens)]
            for token in sorted(range(VOCAB), key=lambda i: -values[i])[: 2 * width]:
                entry = (total + values[token], [*tokens, token])
                if token in (EOS, STOP):
                    done.append((*entry, FinishReason.STOP))
                else:
                    longer.append(entry)
        alive = sorted(longer, key=lambda entry: -entry[0])[:width]
    done += [(*entry, FinishReason.LENGTH) for entry in alive]

    def score(entry: tuple[float, list[int], FinishReason]) -> float:
        length = num_prompt_tokens + len(entry[1]) - (entry[2] is FinishReason.STOP)
        return entry[0] / float(length**penalty)

    best = sorted(done, key=score, reverse=True)[:width]
    return [(tokens, reason) for _, tokens, reason in best]


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 5),
    num_prompt_tokens=st.integers(1, 20),
    penalty=st.sampled_from([-2.0, 0.0, 0.5, 1.0, 2.0, 6.0]),
)
def test_search_equals_the_plain_definition(
    seed: int, width: int, max_tokens: int, num_prompt_tokens: int, penalty: float
) -> None:
    """Also where it ends early, because nothing that goes on can still be among the best."""
    beams = BeamSet(width, max_tokens, num_prompt_tokens, penalty, (EOS,), (STOP,))

    found = [
        (unpack_tokens(beam.tokens), beam.finish_reason) for beam in search(seed, beams, width)
    ]

    assert found == plain_search(seed, width, max_tokens, num_prompt_tokens, penalty)


def test_end_tokens_have_no_reason_and_stop_tokens_have_theirs() -> None:
    """As in any other answer."""
    beams = BeamSet(2, 5, 3, eos_token_ids=(0,), stop_token_ids=(1,))

    beams.advance([row([-1.0, -2.0, -30.0, -40.0], 4)])

    assert [(beam.finish_reason, beam.stop_reason) for beam in beams.best()] == [
        (FinishReason.STOP, None),
        (FinishReason.STOP, 1),
    ]
    assert beams.alive == []  # what goes on is far behind


def test_equal_beams_keep_their_order() -> None:
    """The search is the same each time, whatever is equal."""
    beams = BeamSet(2, 2, 1)
    for _ in range(2):
        beams.advance([row([-1.0, -1.0, -1.0, -1.0], 4) for _ in beams.alive])

    assert [unpack_tokens(beam.tokens) for beam in beams.best()] == [[0, 0], [0, 1]]


def test_search_that_is_cut_off_tells_what_it_has() -> None:
    """With the reason."""
    beams = BeamSet(2, 9, 1)
    beams.advance([row([-1.0, -2.0, -3.0, -4.0], 4)])

    beams.end(FinishReason.ABORT)

    assert beams.alive == []
    assert [(b.tokens[0], b.finish_reason) for b in beams.best()] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_log_probabilities_are_those_of_its_own_tokens(k: int) -> None:
    """Column 0 is the beam's token, not the one that the engine would have sampled."""
    beams = BeamSet(2, 2, 1)
    for _ in range(2):
        beams.advance([row([-1.0, -2.0, -3.0, -4.0], 4) for _ in beams.alive])

    told = joined_logprobs(beams.best()[1], k)

    assert told.token_ids.tolist() == [[0, *range(k)], [1, *range(k)]]
    assert told.logprobs[:, 0].tolist() == [-1.0, -2.0]
    assert told.ranks.tolist() == [1, 2]


def test_many_tokens_cost_little_each() -> None:
    """A step copies a beam's token ids, and nothing else of it."""
    beams = BeamSet(2, 2000, 1)
    rows = row([-1.0, -2.0, -3.0, -4.0], 4)
    while beams.alive:
        beams.advance([rows] * len(beams.alive))

    assert [beam.num_tokens for beam in beams.best()] == [2000, 2000]
