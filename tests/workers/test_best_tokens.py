"""The kernel that looks for the best tokens finds those that torch finds."""

import numpy as np
import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.helpers.built_kernels import backend
from workers import token_choice
from workers.sampler import Sampler

CPU = torch.device("cpu")
SIZES = [1, 3, 127, 128, 129, 1000, 8192, 8193, 100_001]
RANDOM = SamplingParams(temperature=1.0, top_p=0.9, seed=1)


def random_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size, generator=random)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_maxima_and_best_tokens_are_those_of_torch(num_rows: int, vocab_size: int) -> None:
    """Whether or not the last group is full, and where tokens are masked or equal: then the lowest
    id wins."""
    logits = random_logits(num_rows, vocab_size)
    masked = logits.masked_fill(random_logits(num_rows, vocab_size) > 0, -torch.inf)
    for rows in (logits, masked, logits.round(), torch.zeros_like(logits)):
        maxima, tokens = backend().kernels.best_tokens(rows)
        expected = token_choice.group_maxima(rows)
        assert torch.equal(maxima, expected)
        assert torch.equal(tokens, token_choice.argmax(rows, expected))


def test_rows_that_lie_apart_are_read() -> None:
    """As a part of longer rows: what tensor ranks gather."""
    logits = random_logits(3, 500)[:, :333]
    assert backend().kernels.best_tokens(logits)[1].tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("broken", [float("nan"), -torch.inf, torch.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), RANDOM])
def test_broken_logits_give_some_token_and_no_error(broken: float, params: SamplingParams) -> None:
    """Also where all of a row is."""
    sampler = Sampler(300, 2, CPU, 0, backend().kernels)
    for name in "ab":
        sampler.add(name, params, torch.zeros(1), torch.zeros(0))
    logits = random_logits(2, 300)
    logits[0, 7:] = broken
    logits[1] = broken
    assert (sampler.sample(logits, ["a", "b"]).token_ids < 300).all()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), RANDOM])
def test_a_sampler_chooses_the_same_with_and_without(params: SamplingParams) -> None:
    """Greedy and random."""
    logits = 3 * random_logits(4, 5000)
    found = []
    for kernels in (None, backend().kernels):
        sampler = Sampler(5000, 4, CPU, 0, kernels)
        for row in range(4):
            sampler.add(str(row), params, torch.zeros(1), torch.zeros(0))
        found.append(sampler.sample(logits.clone(), ["0", "1", "2", "3"]).token_ids.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("vocab_size", SIZES)
def test_groups_weigh_what_torch_says(vocab_size: int) -> None:
    """At any temperature, also where tokens are masked, for rows in any order; and a row's weights
    are the same bits whatever else is asked for."""
    logits = 3 * random_logits(5, vocab_size)
    logits[1:3].masked_fill_(random_logits(2, vocab_size) > 0, -torch.inf)
    logits[:, 0] = 4.0
    maxima = token_choice.group_maxima(logits)
    rows, temperature = np.array([4, 1, 2]), np.array([0.01, 1.0, 3.7])
    kernels = backend().kernels

    found = kernels.group_weights(logits, maxima, rows, temperature)

    expected = token_choice.group_weights(logits, maxima, rows, temperature)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-30)
    alone = kernels.group_weights(logits, maxima, rows[1:2], temperature[1:2])
    assert torch.equal(found[1:2], alone)


@pytest.mark.parametrize("vocab_size", [1, 127, 1000, 40_001])
def test_tokens_above_a_cut_come_sorted(vocab_size: int) -> None:
    """All of them, whether a weight, a number or a distance says where to cut, and among ties."""
    logits = (3 * random_logits(6, vocab_size)).bfloat16().float()
    logits[5, 1:] = -torch.inf
    maxima = token_choice.group_maxima(logits)
    rows, temperature = np.array([3, 1, 0, 5]), np.array([1.0, 0.5, 2.0, 1.0])
    weights = token_choice.group_weights(logits, maxima, rows, temperature).sum(-1).numpy()
    never = np.iinfo(np.int64).max
    depth = token_choice.Depth(
        weight=np.array([0.9 * weights[0], np.inf, np.inf, 0.5]),
        count=np.array([never, 100, never, never]),
        distance=np.array([np.inf, np.inf, 3.0, np.inf]),
    )

    found = backend().kernels.tokens_above(logits, maxima, rows, temperature, depth)

    for i, row in enumerate(rows):
        best, order = logits[row].sort(descending=True, stable=True)
        tokens = found[i]
        if tokens is None:  # the whole row holds less than was asked for
            assert vocab_size < 100
            continue
        values, token_ids = tokens
        assert values.tolist() == best[: len(values)].tolist()
        assert token_ids.tolist() == order[: len(values)].tolist()
        distance = (best[0] - best).double().numpy() / temperature[i]
        needed = min(
            1 + int((np.exp(-distance).cumsum() < depth.weight[i]).sum()),
            int(depth.count[i]),
            int((distance <= depth.distance[i]).sum()),
        )
        assert needed <= len(values) <= 1.3 * needed + 100
