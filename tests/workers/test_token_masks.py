"""Packed masks over logits: what they ban is never sampled, whatever else a request wants."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.sampling_params import SamplingParams
from engine.step import TokenMasks
from tests.helpers.built_kernels import backend
from workers import token_masks
from workers.native import Kernels
from workers.sampler import Sampler

CPU = torch.device("cpu")
SIZES = [1, 31, 32, 33, 260, 8192, 8193, 20_001]


def packed(allowed: np.ndarray) -> np.ndarray:
    """`[n, vocab]` bool as `TokenMasks.bits`."""
    spare = -allowed.shape[1] % 32
    return np.packbits(np.pad(allowed, ((0, 0), (0, spare))), axis=1, bitorder="little").view("<u4")


def masks_of(vocab_size: int, allowed: dict[str, Sequence[int]]) -> TokenMasks:
    bits = np.zeros((len(allowed), vocab_size), bool)
    for row, token_ids in zip(bits, allowed.values(), strict=True):
        row[list(token_ids)] = True
    return TokenMasks(1, list(allowed), packed(bits))


def random_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size, generator=random)


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    return backend().kernels if request.param == "native" else None


@pytest.mark.parametrize("vocab_size", SIZES)
def test_what_is_not_allowed_becomes_minus_infinity(
    vocab_size: int, kernels: Kernels | None
) -> None:
    """In the rows that are named, in any order; all else stays as it was."""
    random = np.random.default_rng(vocab_size)
    logits = random_logits(5, vocab_size)
    allowed = random.random((3, vocab_size)) < np.array([[0.01], [0.5], [0.99]])
    allowed[1, : vocab_size // 2] = True  # whole words of either kind
    allowed[2, vocab_size // 2 :] = False

    masked = logits.clone()
    token_masks.apply(masked, [4, 0, 2], packed(allowed), kernels)

    expected = logits.clone()
    expected[[4, 0, 2]] = expected[[4, 0, 2]].masked_fill(~torch.from_numpy(allowed), -torch.inf)
    assert torch.equal(masked, expected)


def test_a_mask_of_another_vocabulary_is_refused(kernels: Kernels | None) -> None:
    """Rather than read beyond its end."""
    with pytest.raises(ValueError, match="3 words"):
        token_masks.apply(random_logits(1, 70), [0], np.zeros((1, 2), "<u4"), kernels)


def test_bits_can_be_asked_for_and_counted() -> None:
    """Of any token, also the first and last of a word."""
    allowed = np.zeros((1, 70), bool)
    allowed[0, [0, 31, 32, 69]] = True
    (bits,) = packed(allowed)
    asked = np.array([0, 1, 31, 32, 63, 69])
    assert token_masks.are_allowed(bits, asked).tolist() == [1, 0, 1, 1, 0, 1]
    assert token_masks.num_allowed(bits) == 4


EDITS = [
    {"allowed_token_ids": (1, 2)},
    {"allowed_token_ids": (2, 9)},
    {"min_tokens": 5, "eos_token_ids": (7,)},
    {"min_tokens": 5, "eos_token_ids": (7,), "stop_token_ids": (8, 9)},
    {"min_tokens": 5, "stop_token_ids": (9,), "allowed_token_ids": (2, 9)},
    {"logit_bias": {0: 100.0, 7: -100.0, 8: -100.0, 9: -100.0}},
    {"repetition_penalty": 100.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
]
CHOICES = [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_p": 0.5, "top_k": 3, "min_p": 0.1}]


@pytest.mark.parametrize("allowed", [(7,), (7, 8, 9), (2, 7)])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("edits", EDITS)
def test_a_mask_wins_over_whatever_else_a_request_wants(
    edits: dict[str, object],
    choice: dict[str, object],
    allowed: tuple[int, ...],
    kernels: Kernels | None,
) -> None:
    """Also where the rest bans all that the mask allows: something of it is sampled."""
    sampler = Sampler(300, 2, CPU, 0, kernels)
    params = SamplingParams(**{**choice, **edits})  # type: ignore[arg-type]
    sampler.add("a", params, torch.tensor([7, 8]), torch.tensor([9, 9]))
    sampler.add("b", params, torch.tensor([7, 8]), torch.tensor([9, 9]))
    masks = masks_of(300, {"b": allowed})
    sampled = sampler.sample(random_logits(2, 300), ["a", "b"], masks)
    assert sampled.token_ids[1] in allowed


def test_the_other_wishes_hold_within_a_mask(kernels: Kernels | None) -> None:
    """What the mask leaves is chosen from as ever."""
    sampler = Sampler(300, 3, CPU, 0, kernels)
    greedy = {"temperature": 0.0}
    sampler.add("allowed", SamplingParams(**greedy, allowed_token_ids=(4, 9)), [0], [])  # type: ignore[arg-type]
    sampler.add("banned", SamplingParams(**greedy, min_tokens=1, eos_token_ids=(4,)), [0], [])  # type: ignore[arg-type]
    sampler.add("biased", SamplingParams(**greedy, logit_bias={9: 50.0}), [0], [])  # type: ignore[arg-type]
    logits = torch.arange(300, 0, -1).float().repeat(3, 1)
    ids = ["allowed", "banned", "biased"]
    masks = masks_of(300, dict.fromkeys(ids, (4, 5, 9)))
    assert sampler.sample(logits, ids, masks).token_ids.tolist() == [4, 5, 9]


def test_log_probabilities_are_the_models_own(kernels: Kernels | None) -> None:
    """As they are before bias and penalties, they are before a mask."""
    logits = random_logits(1, 300)
    expected = logits.log_softmax(-1)[0]
    sampler = Sampler(300, 1, CPU, 0, kernels)
    sampler.add("r", SamplingParams(temperature=0.0, logprobs=3), [0], [])  # type: ignore[arg-type]
    sampled = sampler.sample(logits.clone(), ["r"], masks_of(300, {"r": (11,)}))
    found = sampled.logprobs["r"]
    assert sampled.token_ids.tolist() == [11]
    assert found.token_ids[0].tolist() == [11, *expected.topk(3).indices.tolist()]
    assert found.logprobs[0, 0] == pytest.approx(float(expected[11]))
