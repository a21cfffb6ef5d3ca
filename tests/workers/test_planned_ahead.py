"""An engine core over a real worker: planned ahead or not, each request gets the same.

The worker goes on with tokens that it has sampled itself, while the core does not know them yet. So
whatever depends on a request's own tokens is asked for here: penalties, the least number of tokens,
seeds, log probabilities, bad words, thoughts, ends.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.sampling_params import ThinkingBudget
from engine.step import NO_TOKEN, OWN_TOKEN
from engine.wire import EngineCoreRequest, FinishReason
from tests.helpers.engine_core import CoreUnderTest, Received, make_request
from tests.helpers.in_process_worker import InProcessWorker
from tests.helpers.tiny_models import tiny_model
from tests.helpers.worker_settings import worker_config
from tests.workers.test_scripted import scripted_folder
from workers.input_batch import InputBatch, Step

ANY_END = tuple(range(0, 260, 9))
"""So many stop tokens that random tokens often end a request."""

AS_GIVEN: dict[str, Any] = {"vocab_size": 1 << 20}
"""Prompts of any token ids, not of the simulated workers' few."""

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 30},
    {"temperature": 0.9, "seed": 5, "max_tokens": 25, "eos_token_ids": ANY_END},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "max_tokens": 30, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "max_tokens": 30},
    {"temperature": 1.2, "seed": 7, "min_tokens": 8, "stop_token_ids": ANY_END, "max_tokens": 40},
    {"temperature": 0.0, "logprobs": 2, "max_tokens": 12},
    {"temperature": 0.7, "seed": 8, "logprobs": 0, "presence_penalty": 1.0, "max_tokens": 12},
    {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 6},
    {"temperature": 1.0, "seed": 9, "logit_bias": {17: 4.0}, "max_tokens": 20},
    {"temperature": 1.0, "seed": 1, "allowed_token_ids": (3, 4, 9, 18), "max_tokens": 20},
    {"temperature": 0.0, "ignore_eos": True, "eos_token_ids": ANY_END, "max_tokens": 15},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 1.0, "seed": 2, "max_tokens": 2},
    {
        "temperature": 0.9,
        "seed": 3,
        "max_tokens": 20,
        "bad_words_token_ids": ((5, 6), (9,), (6, 9, 7)),
        "logprobs": 0,
        "logprob_token_ids": (9, 2),
    },
    {
        "temperature": 0.0,
        "max_tokens": 20,
        "thinking_budget": ThinkingBudget(3, (5,), 11, is_open=True),
    },
]


@pytest.fixture(params=["scripted", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    if request.param == "llama":
        return tiny_model("llama", tmp_path_factory.getbasetemp())
    script = {"kind": "cycle", "token_ids": [5, 6, 9, 7]}
    return scripted_folder(tmp_path_factory.mktemp("scripted"), **script)


@pytest.fixture
def make_engine(folder: Path) -> Callable[..., tuple[CoreUnderTest, InProcessWorker]]:
    def make(ahead: bool, num_blocks: int = 200) -> tuple[CoreUnderTest, InProcessWorker]:
        config = dataclasses.replace(
            worker_config(folder),
            cache=CacheConfig(block_size=4, num_gpu_blocks_override=num_blocks),
            scheduler=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=ahead
            ),
        )
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, max_model_len=64)
        )
        worker = InProcessWorker(config)
        return CoreUnderTest(config, worker), worker

    return make


def requests() -> list[EngineCoreRequest]:
    noise = np.random.default_rng(3)
    return [
        make_request(f"{number}", noise.integers(2, 60, 5 + number).tolist(), **AS_GIVEN, **asked)
        for number, asked in enumerate(ASKED)
    ]


def run(engine: CoreUnderTest) -> dict[str, Received]:
    """Two come with each step."""
    for two in zip(*[iter([*requests(), None])] * 2, strict=True):
        engine.add(*(request for request in two if request is not None))
        engine.step()
    engine.run()
    return engine.received


@pytest.mark.parametrize("num_blocks", [200, 22], ids=["roomy", "preempting"])
def test_everybody_gets_the_same_planned_ahead_or_not(
    make_engine: Callable[..., tuple[CoreUnderTest, InProcessWorker]], num_blocks: int
) -> None:
    """Tokens, reasons and log probabilities."""
    plain, _ = make_engine(False, num_blocks)
    ahead, worker = make_engine(True, num_blocks)
    expected, found = run(plain), run(ahead)

    assert {r: f.token_ids for r, f in found.items()} == {
        r: e.token_ids for r, e in expected.items()
    }
    for request_id, received in expected.items():
        assert found[request_id].finish_reasons == received.finish_reasons
        assert_same_logprobs(found[request_id], received)
    assert FinishReason.STOP in [f.finish_reasons[0] for f in found.values()]
    assert (ahead.core.stats().num_preemptions > 0) == (num_blocks == 22)
    own = [OWN_TOKEN in plan.continued.new_token_ids for plan in worker.plans]
    assert sum(own) > len(own) / 2


def assert_same_logprobs(found: Received, expected: Received) -> None:
    for ours, theirs in (
        (found.new_logprobs, expected.new_logprobs),
        (found.prompt_logprobs, expected.prompt_logprobs),
    ):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_after_the_end_is_left_out(
    make_engine: Callable[..., tuple[CoreUnderTest, InProcessWorker]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    """A lone request that stops costs no forward pass more than without planning ahead, and what
    was never computed is not taken from the cache afterwards."""
    prompt = [4] * 6
    (engine, worker), (other, _) = make_engine(ahead), make_engine(False)
    other.add(make_request("r", prompt, temperature=0.0, max_tokens=12))
    other.run()
    tokens = other.received["r"].token_ids
    # With the stop token a block is full.
    full = [i for i in range(12) if (len(prompt) + i + 1) % 4 == 0]
    stop = 1 + next(i for i in full if tokens.index(tokens[i]) == i)
    num_passes = 0
    forward = worker.worker._model.forward

    def count(step: Step, batch: InputBatch) -> torch.Tensor | None:
        nonlocal num_passes
        num_passes += 1
        return forward(step, batch)

    monkeypatch.setattr(worker.worker._model, "forward", count)
    engine.add(make_request("s", prompt, temperature=0.0, stop_token_ids=(tokens[stop - 1],)))
    engine.run()
    assert engine.received["s"].token_ids == tokens[:stop]
    assert num_passes == stop
    left_out = [r for r in worker.replies if NO_TOKEN in r.sampled_token_ids.tolist()]
    assert len(left_out) == ahead

    next_turn = [*prompt, *tokens[:stop], 8, 8]
    engine.add(make_request("t", next_turn, **AS_GIVEN, temperature=0.0, max_tokens=8))
    engine.run()
    assert engine.received["t"].num_cached_tokens == len(prompt) + stop - 4
