"""Tokens of the model runner against plain transformers, and what a step costs and returns.

Everything is float32 and greedy, on tiny models of each architecture: the tokens must be equal,
whatever else happens in the batch.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.sampling_params import SamplingParams
from engine.step import SchedulerOutput
from tests.helpers.plan_driver import PlanDriver, Sequence
from tests.helpers.tiny_models import (
    ARCHITECTURES,
    clear_prompts,
    greedy_tokens,
    plain_logits,
    tiny_model,
)
from tests.helpers.worker_settings import SPEC, loaded_worker, worker_config
from workers import model_runner
from workers.worker import Worker

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of an architecture's tiny model."""
    return lambda name: tiny_model(name, tmp_path_factory.getbasetemp())


class Case:
    """A worker, and what plain transformers says to 32 prompts."""

    def __init__(self, folder: Path, attention_backend: str) -> None:
        self.prompts = clear_prompts(folder, 32, NUM_TOKENS)
        self.expected = [greedy_tokens(folder, p, NUM_TOKENS) for p in self.prompts]
        self.worker = loaded_worker(worker_config(folder, attention_backend=attention_backend))
        self.driver = PlanDriver(self.worker.execute_model)

    def sequences(self) -> list[Sequence]:
        return [Sequence(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(self.prompts)]


@pytest.fixture(
    scope="module", params=[(name, "cpu") for name in ARCHITECTURES] + [("gemma3", "reference")]
)
def case(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Iterator[Case]:
    torch.set_num_threads(1)
    name, attention_backend = request.param
    case = Case(folder_of(name), attention_backend)
    yield case
    case.worker.close()


def test_tokens_alone_equal_transformers(case: Case) -> None:
    """20 prompts, each with the batch to itself."""
    outputs = [case.driver.run([sequence])[0] for sequence in case.sequences()[:20]]
    assert outputs == case.expected[:20]


def test_tokens_in_a_mixed_batch_equal_transformers(case: Case) -> None:
    """32 requests that arrive while others decode."""
    assert case.driver.run(case.sequences(), arrivals_per_step=4) == case.expected


def test_tokens_with_chunked_prefill_equal_transformers(case: Case) -> None:
    """Prompts computed 5 tokens at a time, with decodes in the same steps."""
    outputs = case.driver.run(case.sequences(), chunk=5, budget=40, arrivals_per_step=4)
    assert outputs == case.expected


def test_tokens_after_preemption_equal_transformers(case: Case) -> None:
    """Requests that lose their blocks in the middle, and are computed again from all their
    tokens."""
    outputs = case.driver.run(
        case.sequences(), chunk=7, arrivals_per_step=4, preempt_at=range(4, 20)
    )
    assert outputs == case.expected


def test_tokens_after_a_prefix_hit_equal_transformers(case: Case) -> None:
    """A request that starts on another's full blocks, of which nothing is computed again."""
    for prompt, expected in zip(case.prompts[:10], case.expected[:10], strict=True):
        first, second = Sequence("first", prompt, 40), Sequence("second", prompt, NUM_TOKENS)
        case.driver.step([first])
        num_shared = (len(prompt) - 1) // SPEC.block_size
        second.block_ids = first.block_ids[:num_shared]
        second.num_computed = num_shared * SPEC.block_size
        while not second.is_done:
            case.driver.step([first, second])
        assert second.output == expected
        case.driver.forget(second, num_shared)
        case.driver.drop(first)


@pytest.fixture(scope="module")
def llama(folder_of: Callable[[str], Path]) -> Iterator[Worker]:
    torch.set_num_threads(1)
    worker = loaded_worker(worker_config(folder_of("llama")))
    yield worker
    worker.close()


def test_a_partial_prefill_samples_nothing(llama: Worker) -> None:
    """A token comes with the last chunk of the prompt, not before."""
    driver = PlanDriver(llama.execute_model)
    sequence = Sequence("a", list(range(2, 12)))
    driver.step([sequence], chunk=6)
    assert sequence.output == []
    driver.step([sequence], chunk=6)
    assert len(sequence.output) == 1
    driver.run([sequence])


def test_a_plan_that_schedules_nothing_is_answered(llama: Worker) -> None:
    """A plan may only say who has left."""
    driver = PlanDriver(llama.execute_model)
    driver.step([Sequence("a", [5] * 4)])
    output = llama.execute_model(SchedulerOutput(7, {}, dropped_request_ids=["a"]))
    assert output is not None
    assert (output.step, output.request_ids, len(output.sampled_token_ids)) == (7, [], 0)


def test_the_sampler_forgets_who_has_left(llama: Worker) -> None:
    """What it keeps per request goes with the request, also when that was preempted in between."""
    sequences = [Sequence(f"r{i}", [i + 3] * 9, 6) for i in range(9)]
    PlanDriver(llama.execute_model).run(sequences, preempt_at={2, 4})
    assert llama._runner is not None
    assert llama._runner._sampler is not None
    assert llama._runner._sampler._table.slots == {}


def test_only_sampled_rows_reach_the_head(llama: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are computed for the last token of a prompt, not for all of it."""
    rows: list[int] = []
    compute = llama._model.logits

    def count(states: torch.Tensor) -> torch.Tensor | None:
        rows.append(len(states))
        return compute(states)

    monkeypatch.setattr(llama._model, "logits", count)
    PlanDriver(llama.execute_model).run([Sequence("a", [5] * 30, 3), Sequence("b", [6] * 20, 3)])
    assert rows == [2, 2, 2]


@pytest.mark.parametrize("chunk", [1 << 30, 4])
def test_prompt_logprobs_equal_transformers(
    llama: Worker,
    folder_of: Callable[[str], Path],
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each prompt token after the first has its log probability, computed in chunks or at once,
    beside a neighbour that wants none."""
    monkeypatch.setattr(model_runner, "PROMPT_LOGPROB_ROWS", 8)
    prompt = list(range(10, 33))
    wanted = SamplingParams(temperature=0.0, prompt_logprobs=2)
    sequence = Sequence("a", prompt, 2, params=wanted)
    PlanDriver(llama.execute_model).run([Sequence("b", [9] * 7), sequence], chunk=chunk)

    truth = plain_logits(folder_of("llama"), prompt).log_softmax(-1)[:-1]
    found = [torch.from_numpy(part.logprobs.copy()) for part in sequence.prompt_logprobs]
    ids = torch.tensor(prompt[1:])[:, None]
    torch.testing.assert_close(torch.cat(found)[:, :1], truth.gather(1, ids), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(found)[:, 1:], truth.topk(2).values, atol=1e-4, rtol=0)


def test_seeded_tokens_do_not_depend_on_the_batch(llama: Worker) -> None:
    """A seeded request samples the same tokens alone and among others."""
    seeded = SamplingParams(temperature=1.0, seed=3)
    driver = PlanDriver(llama.execute_model)
    alone = driver.run([Sequence("a", [8] * 9, params=seeded)])[0]
    others = [Sequence(f"o{i}", [i + 2] * 11, params=SamplingParams(seed=i)) for i in range(9)]
    assert driver.run([*others, Sequence("b", [8] * 9, params=seeded)], chunk=4)[-1] == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(folder_of: Callable[[str], Path], dtype: str) -> None:
    """Two bytes a number work on CPU, and log probabilities stay near the exact ones."""
    folder = folder_of("qwen3")
    worker = loaded_worker(worker_config(folder, dtype=dtype))
    prompt = list(range(40, 60))
    wanted = SamplingParams(temperature=0.0, prompt_logprobs=0)
    sequence = Sequence("a", prompt, 1, params=wanted)
    PlanDriver(worker.execute_model).run([sequence])

    truth = plain_logits(folder, prompt).log_softmax(-1)[:-1]
    found = torch.from_numpy(sequence.prompt_logprobs[0].logprobs.copy())
    error = found - truth.gather(1, torch.tensor(prompt[1:])[:, None])
    assert error.abs().mean() < 0.15  # of values around -10
