"""The sampler keeps each request's wishes and its noise, whatever the batch."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling_params import SamplingParams
from tests.helpers import plain_sampling
from workers.sampler import SampledTokens, Sampler, prompt_logprobs

VOCAB = 1000
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_sampler(vocab_size: int = VOCAB, seed: int = 0) -> Sampler:
    return Sampler(vocab_size, 16, CPU, seed)


def add(
    sampler: Sampler,
    request_id: str,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> None:
    sampler.add(request_id, params, np.array(prompt, np.uint32), np.array(output, np.uint32))


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.manual_seed(seed)) * 3


def generate(
    sampler: Sampler, request_id: str, num_tokens: int, start: int = 0, beside: Sequence[str] = ()
) -> list[int]:
    """Sample tokens of a request from logits that depend on the step alone."""
    tokens = []
    for step in range(start, start + num_tokens):
        logits = random_logits(1, seed=step).repeat(1 + len(beside), 1)
        sampled = sampler.sample(logits, [*beside, request_id])
        tokens.append(int(sampled.token_ids[-1]))
        sampler.append([*beside, request_id], sampled.token_ids.astype(np.int64))
    return tokens


MIX = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.3, top_p=0.9),
    SamplingParams(seed=3, top_k=20, logprobs=3),
    SamplingParams(seed=4, min_p=0.02, temperature=2.0),
    SamplingParams(seed=5, repetition_penalty=1.4, presence_penalty=0.6, logprobs=0),
    SamplingParams(seed=6, logit_bias={7: 4.0}, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, logprobs=20, repetition_penalty=1.2),
    SamplingParams(seed=8, min_tokens=30, eos_token_ids=(0, 1), stop_token_ids=(2,)),
    SamplingParams(seed=9, allowed_token_ids=(5, 50, 500), logprobs=2),
    SamplingParams(seed=10, top_k=700, top_p=0.99, temperature=3.0),
    SamplingParams(seed=11, top_p=0.999, temperature=9.0),
]


def sample_mix(rows: list[int], logits: Tensor, vocab_size: int) -> SampledTokens:
    sampler = make_sampler(vocab_size)
    for row in rows:
        add(sampler, f"r{row}", MIX[row], prompt=[3, 5, 7], output=[5, 9, 5, row])
    return sampler.sample(logits[rows].clone(), [f"r{row}" for row in rows])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [1000, 70_001])
def test_a_row_is_the_same_alone_and_in_a_batch(vocab_size: int, num_threads: int) -> None:
    """Tokens and log probabilities are equal bit for bit, whatever the neighbours and threads."""
    torch.set_num_threads(num_threads)
    logits = random_logits(len(MIX), vocab_size)
    together = sample_mix(list(range(len(MIX))), logits, vocab_size)
    backwards = sample_mix(list(reversed(range(len(MIX)))), logits, vocab_size)

    assert together.token_ids.tolist() == backwards.token_ids[::-1].tolist()
    for row in range(len(MIX)):
        alone = sample_mix([row], logits, vocab_size)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs.keys() == together.logprobs.keys() & {f"r{row}"}
        for key, found in alone.logprobs.items():
            assert found.logprobs.tobytes() == together.logprobs[key].logprobs.tobytes()
            assert found.token_ids.tobytes() == together.logprobs[key].token_ids.tobytes()


@pytest.mark.parametrize("params", MIX, ids=range(len(MIX)))
def test_tokens_follow_the_plain_definition(params: SamplingParams) -> None:
    """Many requests with seeds of their own draw as the definition says: a chi-square test."""
    num_rows, prompt, output = 4_000, [3, 5, 7], [5, 9, 5]
    logits = random_logits(1, 60)
    sampler = Sampler(60, num_rows, CPU, 0)
    bias = {k: v for k, v in (params.logit_bias or {}).items() if k < 60}
    allowed = params.allowed_token_ids and (5, 50)
    for row in range(num_rows):
        add(sampler, str(row), _with(params, row, bias, allowed), prompt, output)

    tokens = sampler.sample(logits.repeat(num_rows, 1), [str(row) for row in range(num_rows)])

    counts = np.bincount(tokens.token_ids, minlength=60)
    expected = num_rows * plain_sampling.probabilities(
        logits[0].double().numpy(), _with(params, 0, bias, allowed), prompt, output
    )
    assert not counts[expected == 0].any()
    likely = expected > 5
    freedom = max(1, likely.sum() - 1)
    square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert square < freedom + 5 * np.sqrt(2 * freedom)


def _with(
    params: SamplingParams,
    seed: int,
    bias: dict[int, float] | None,
    allowed: tuple[int, ...] | None,
) -> SamplingParams:
    return msgspec.structs.replace(
        params, seed=seed, logit_bias=bias or None, allowed_token_ids=allowed, logprobs=None
    )


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    """Seed 42 twice is equal; seed 43 differs."""
    outputs: list[list[int]] = []
    for seed in (42, 42, 43):
        sampler = make_sampler(seed=len(outputs))
        add(sampler, f"request {len(outputs)}", SamplingParams(seed=seed))
        outputs.append(generate(sampler, f"request {len(outputs)}", 30))

    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


def test_a_seed_gives_the_same_tokens_beside_others() -> None:
    """Neighbours come and go without a trace in a seeded request's output."""
    alone, crowd = make_sampler(), make_sampler()
    for sampler in (alone, crowd):
        add(sampler, "mine", SamplingParams(seed=7))
    add(crowd, "a", SamplingParams())
    add(crowd, "b", SamplingParams(seed=7, top_k=3))

    expected = generate(alone, "mine", 20)
    found = generate(crowd, "mine", 10, beside=["a", "b"])
    crowd.remove("a")
    found += generate(crowd, "mine", 10, start=10, beside=["b"])

    assert found == expected


def test_a_request_that_comes_back_with_its_output_continues_exactly() -> None:
    """Preemption and hand-over lose neither noise nor penalties nor `min_tokens`."""
    params = SamplingParams(
        seed=3, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=15, eos_token_ids=(4,)
    )
    whole = make_sampler()
    add(whole, "x", params, prompt=[1, 2])
    expected = generate(whole, "x", 30)

    elsewhere = make_sampler(seed=99)
    add(elsewhere, "y", params, prompt=[1, 2], output=expected[:12])
    found = generate(elsewhere, "y", 18, start=12)

    assert found == expected[12:]


def test_requests_without_a_seed_draw_different_tokens() -> None:
    """Neither two requests at once nor the same id again repeat each other's noise."""
    sampler = make_sampler()
    outputs = []
    for request_id in ("a", "b", "a"):
        add(sampler, request_id, SamplingParams())
        outputs.append(tuple(generate(sampler, request_id, 20)))
        sampler.remove(request_id)

    assert len(set(outputs)) == 3


def test_engines_with_different_default_seeds_draw_different_tokens() -> None:
    """Two ranks that get the same prompt do not answer alike; the same start repeats a run."""
    outputs = []
    for seed in (0, 1, 0):
        sampler = make_sampler(seed=seed)
        add(sampler, "a", SamplingParams())
        outputs.append(generate(sampler, "a", 20))

    assert outputs[0] != outputs[1]
    assert outputs[0] == outputs[2]


@pytest.mark.row("F-36")
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-7, 9e-6, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Nothing overflows on the way to zero."""
    logits = random_logits(1)
    sampler = make_sampler()
    add(sampler, "a", SamplingParams(temperature=temperature, seed=5))

    sampled = sampler.sample(logits.clone(), ["a"])

    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-4)])
def test_a_cut_to_one_token_is_greedy(params: SamplingParams) -> None:
    """The narrowest cuts leave the best token."""
    logits = random_logits(1)
    sampler = make_sampler()
    add(sampler, "a", params)

    sampled = sampler.sample(logits.clone(), ["a"])

    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()


def test_log_probabilities_are_of_the_model_before_any_edit() -> None:
    """Masks, bias, penalties and temperature do not show, so no value is minus infinity."""
    logits = random_logits(2)
    sampler = make_sampler()
    add(sampler, "plain", SamplingParams(temperature=0.0, logprobs=2))
    params = SamplingParams(
        temperature=5.0, allowed_token_ids=(5, 6), logit_bias={5: 3.0}, logprobs=4
    )
    add(sampler, "edited", params)

    sampled = sampler.sample(logits.clone(), ["plain", "edited"])

    for row, (request_id, k) in enumerate([("plain", 2), ("edited", 4)]):
        token = torch.from_numpy(sampled.token_ids[row : row + 1].astype(np.int64))
        expected = prompt_logprobs(logits[row : row + 1], token, k)
        found = sampled.logprobs[request_id]
        assert found.logprobs.shape == (1, 1 + k)
        assert found.logprobs.tolist() == expected.logprobs.tolist()
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.ranks.tolist() == expected.ranks.tolist()


def test_only_those_who_ask_get_log_probabilities() -> None:
    """The others do not pay for them."""
    sampler = make_sampler()
    add(sampler, "a", SamplingParams(logprobs=0))
    add(sampler, "b", SamplingParams())

    sampled = sampler.sample(random_logits(2), ["b", "a"])

    assert sampled.logprobs.keys() == {"a"}


def test_places_are_given_to_the_next() -> None:
    """Two at a time, any number of requests come and go, and nothing of the former is seen."""
    small, large = Sampler(VOCAB, 2, CPU, 0), Sampler(VOCAB, 20, CPU, 0)
    for row in range(20):
        ids = [str(i) for i in range(max(0, row - 1), row + 1)]
        for sampler in (small, large):
            add(sampler, str(row), MIX[row % len(MIX)])
        logits = random_logits(1).repeat(len(ids), 1)
        found, expected = (s.sample(logits.clone(), ids) for s in (small, large))
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        if row:
            small.remove(str(row - 1))


def test_a_request_that_leaves_twice_or_joins_twice_is_our_own_fault() -> None:
    """The core sends a request once until it drops it, so its count has gone wrong."""
    sampler = make_sampler()
    add(sampler, "a", SamplingParams())
    with pytest.raises(AssertionError, match="a joined twice"):
        add(sampler, "a", SamplingParams())
    sampler.remove("a")
    with pytest.raises(KeyError):
        sampler.remove("a")


def test_an_unseeded_request_that_comes_back_goes_on_with_other_numbers() -> None:
    """After preemption; a seeded one goes on with its own."""
    sampler, params = make_sampler(), SamplingParams()
    add(sampler, "a", params)
    expected = generate(sampler, "a", 20)
    sampler.remove("a")
    add(sampler, "a", params, output=expected[:5])
    assert generate(sampler, "a", 15, start=5) != expected[5:]


def test_log_probabilities_of_listed_tokens_are_the_models_own() -> None:
    """In the order of the list, before any edit, beside requests that ask for the best."""
    logits = random_logits(3)
    listed = (7, VOCAB - 1, 0, 7)
    sampler = make_sampler()
    add(sampler, "best", SamplingParams(temperature=0.0, logprobs=2))
    add(sampler, "listed", SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=listed))
    params = SamplingParams(logprobs=5, logprob_token_ids=listed, logit_bias={0: 50.0})
    add(sampler, "edited", params)

    sampled = sampler.sample(logits.clone(), ["best", "listed", "edited"])

    assert sampled.logprobs["best"].token_ids.shape == (1, 3)
    plain = torch.log_softmax(logits.double(), -1)
    for row, request_id in ((1, "listed"), (2, "edited")):
        found = sampled.logprobs[request_id]
        token_ids = [int(sampled.token_ids[row]), *listed]
        assert found.token_ids.tolist() == [token_ids]
        assert found.logprobs[0] == pytest.approx(plain[row, token_ids].tolist(), abs=1e-5)
    sampler.remove("listed")
    add(sampler, "next", SamplingParams(temperature=0.0, logprobs=1))
    assert sampler.sample(random_logits(1), ["next"]).logprobs["next"].token_ids.shape == (1, 2)
