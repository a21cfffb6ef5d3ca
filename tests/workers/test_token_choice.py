"""Choosing tokens without sorting gives exactly what sorting would give."""

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling_params import SamplingParams
from tests.helpers import plain_sampling
from tests.helpers.built_kernels import backend
from workers import token_choice
from workers.token_choice import Cuts, RowScans

NUM_DRAWS = 512
TOLERANCE = 0.015
"""Of the frequency of a token, and of all up to a token. Points of a Sobol sequence fill the cube
of a draw's numbers far more evenly than random ones would."""

TOLERANCE_BY_RANK = 0.06
"""Of all tokens that are at least as likely, which lie all over the cube."""

_SOBOL = torch.quasirandom.SobolEngine(token_choice.NUM_NUMBERS)  # type: ignore[no-untyped-call]
EVEN = (_SOBOL.draw(NUM_DRAWS).double().numpy() + 0.5 / NUM_DRAWS).clip(0.0, 1.0 - 1e-9)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.manual_seed(seed)) * spread


def cuts_of(params: SamplingParams, num_rows: int, vocab_size: int) -> Cuts:
    top_k = params.top_k if params.top_k > 0 else vocab_size
    return Cuts(
        temperature=np.full(num_rows, params.temperature),
        min_p=np.full(num_rows, params.min_p),
        top_k=np.full(num_rows, min(top_k, vocab_size)),
        top_p=np.full(num_rows, params.top_p),
    )


@pytest.fixture(params=["torch", "kernels"])
def scans(request: pytest.FixtureRequest) -> RowScans | None:
    """What passes over whole rows."""
    return None if request.param == "torch" else backend().kernels


def frequencies(logits: Tensor, params: SamplingParams, scans: RowScans | None) -> np.ndarray:
    """Draw from one row with noise that is spread evenly."""
    vocab_size = logits.shape[0]
    rows = np.zeros(NUM_DRAWS, np.int64)
    batch = logits.unsqueeze(0)
    tokens = token_choice.choose(
        batch,
        token_choice.group_maxima(batch),
        rows,
        cuts_of(params, NUM_DRAWS, vocab_size),
        EVEN,
        scans,
    )
    return np.bincount(tokens, minlength=vocab_size) / NUM_DRAWS


def assert_distributed(
    logits: Tensor, params: SamplingParams, scans: RowScans | None = None
) -> None:
    expected = plain_sampling.probabilities(logits.double().numpy(), params)
    found = frequencies(logits, params, scans)
    excess = found - expected
    assert not found[expected == 0].any()
    # Where each of many tokens is unlikely, only sums can be wrong by much.
    assert abs(excess).max() <= TOLERANCE
    assert abs(excess.cumsum()).max() <= TOLERANCE
    best_first = np.argsort(-expected, kind="stable")
    assert abs(excess[best_first].cumsum()).max() <= TOLERANCE_BY_RANK


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 1000, 40_000])
def test_best_token_is_found_group_by_group(vocab_size: int) -> None:
    """The two-level argmax is torch's, also in a last group that is not full."""
    logits = random_logits(20, vocab_size)
    logits[-1] = torch.arange(vocab_size)

    tokens = token_choice.argmax(logits, token_choice.group_maxima(logits))

    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_lowest_id_wins_among_equals() -> None:
    """A tie is broken the same way everywhere."""
    logits = torch.zeros(1, 1000)
    logits[0, [300, 305, 900]] = 7.0

    assert token_choice.argmax(logits, token_choice.group_maxima(logits)).tolist() == [300]


@pytest.mark.parametrize("vocab_size", [50, 64, 65, 5_000, 40_000, 40_001])
@pytest.mark.parametrize("size", [64, 1024])
def test_candidates_are_the_best_tokens_in_order(vocab_size: int, size: int) -> None:
    """The candidates are the head of the sorted vocabulary."""
    logits = random_logits(5, vocab_size)
    logits[:, -1] = 20.0  # in the last group, which may be short
    rows = torch.tensor([3, 1])

    values, token_ids = token_choice.candidates(
        logits, token_choice.group_maxima(logits), rows, min(size, vocab_size)
    )

    best, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, best[:, :size])
    assert torch.equal(token_ids, order[:, :size])


def test_whole_vocabulary_is_sorted_as_torch_sorts_it() -> None:
    """Sorting by integer keys keeps the order of floats of either sign, zeros and infinities."""
    logits = random_logits(3, 999).round()
    logits[:, :7] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38])

    values, token_ids = token_choice.candidates(
        logits, token_choice.group_maxima(logits), torch.arange(3), 999
    )

    best, order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, best)
    assert torch.equal(token_ids, order)


CASES = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=5.0),
    "cold": SamplingParams(temperature=2e-5),
    "top_k": SamplingParams(top_k=5),
    "top_k at a level": SamplingParams(top_k=64),
    "top_k above a level": SamplingParams(top_k=1500),
    "top_p": SamplingParams(top_p=0.9),
    "narrow top_p": SamplingParams(top_p=1e-4),
    "wide top_p": SamplingParams(top_p=0.999),
    "min_p": SamplingParams(min_p=0.05),
    "tiny min_p": SamplingParams(min_p=1e-6),
    "strict min_p": SamplingParams(min_p=1.0),
    "all": SamplingParams(temperature=1.3, top_k=40, top_p=0.8, min_p=0.01),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_draws_follow_the_plain_definition(
    params: SamplingParams, spread: float, scans: RowScans | None
) -> None:
    """Every cut, alone and together, gives the probabilities of the textbook."""
    assert_distributed(random_logits(1, 1_700, spread=spread)[0], params, scans)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_few_candidates_lead_to_the_same_draws(
    params: SamplingParams, spread: float, monkeypatch: pytest.MonkeyPatch, scans: RowScans | None
) -> None:
    """A row whose candidates do not suffice gets more of them, and at last all."""
    monkeypatch.setattr(token_choice, "LEVELS", (3, 5))

    assert_distributed(random_logits(1, 3_001, spread=spread)[0], params, scans)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
@pytest.mark.parametrize("levels", [(64, 1024), (3, 5)])
def test_ties_are_cut_by_id(
    params: SamplingParams,
    levels: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    scans: RowScans | None,
) -> None:
    """Logits that came from bfloat16 often tie; a cut through equals keeps the lower ids."""
    monkeypatch.setattr(token_choice, "LEVELS", levels)

    assert_distributed((random_logits(1, 3_000)[0] * 2).round() / 2, params, scans)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_impossible_tokens_are_never_drawn(params: SamplingParams, scans: RowScans | None) -> None:
    """Tokens at minus infinity stay out, however few are left."""
    logits = torch.full((3_000,), -torch.inf)
    logits[[5, 128, 2_999]] = torch.tensor([1.0, 1.5, 2.0])

    assert_distributed(logits, params, scans)


def test_a_large_vocabulary_is_sampled_by_its_groups(scans: RowScans | None) -> None:
    """The same at a size where the real levels go through the groups."""
    logits = random_logits(1, 70_001, spread=4.0)[0]

    assert_distributed(logits, SamplingParams(top_p=0.95), scans)


@settings(max_examples=60)
@given(
    vocab_size=st.integers(1, 400),
    seed=st.integers(0, 1000),
    decimals=st.integers(0, 3),
    temperature=st.floats(0.05, 10.0),
    top_k=st.sampled_from([0, 1, 2, 7, 63, 64, 65, 1000]),
    top_p=st.sampled_from([1e-4, 0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 0.9]),
    with_kernels=st.booleans(),
)
def test_any_parameters_give_the_plain_distribution(
    vocab_size: int,
    seed: int,
    decimals: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    with_kernels: bool,
) -> None:
    """No combination of limits and ties makes an exception or another distribution."""
    logits = random_logits(1, vocab_size, seed)[0].round(decimals=decimals)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    with patch.object(token_choice, "LEVELS", (2, 5)):
        assert_distributed(logits, params, backend().kernels if with_kernels else None)


@pytest.mark.parametrize("vocab_size", [200, 40_001])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_give_some_token_and_no_error(
    vocab_size: int, broken: float, scans: RowScans | None
) -> None:
    """A model that overflows spoils its own row, never the step."""
    logits = torch.full((1, vocab_size), broken)

    for params in CASES.values():
        tokens = token_choice.choose(
            logits,
            token_choice.group_maxima(logits),
            np.array([0]),
            cuts_of(params, 1, vocab_size),
            np.full((1, token_choice.NUM_NUMBERS), 0.5),
            scans,
        )
        assert 0 <= tokens[0] < vocab_size


@pytest.mark.parametrize("uniform", [2.0**-53, 1 - 2.0**-53])
def test_extreme_noise_hits_a_possible_token(uniform: float, scans: RowScans | None) -> None:
    """The least and the largest number that noise can be end inside the distribution."""
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 200:700] = random_logits(1, 500)[0]

    for params in CASES.values():
        tokens = token_choice.choose(
            logits,
            token_choice.group_maxima(logits),
            np.array([0]),
            cuts_of(params, 1, 1000),
            np.full((1, token_choice.NUM_NUMBERS), uniform),
            scans,
        )
        assert 200 <= tokens[0] < 700


@pytest.mark.parametrize("top_p", [1.0, 0.98])
def test_nearly_the_same_logits_give_the_same_draws(top_p: float, scans: RowScans | None) -> None:
    """The size of a batch decides over the last bits, and a seeded stream that goes on in another
    batch must say the same. One number over the whole vocabulary would change four draws in ten
    of these, which differ by far more."""
    num_draws, vocab_size = 60, 262_144
    rows = np.zeros(num_draws, np.int64)
    uniform = np.random.default_rng(0).random((num_draws, token_choice.NUM_NUMBERS))
    cuts = cuts_of(SamplingParams(temperature=2.0, top_p=top_p), num_draws, vocab_size)
    logits = random_logits(1, vocab_size)

    one, other = (
        token_choice.choose(each, token_choice.group_maxima(each), rows, cuts, uniform, scans)
        for each in (logits, logits * (1 + 1e-3))
    )

    assert len(set(one)) > num_draws / 2
    assert (one != other).sum() <= 4
