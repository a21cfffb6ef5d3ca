"""Tensor and pipeline parallelism, with real ranks over gloo: the tokens stay those of one
process."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from engine.step import KVCacheSpec
from tests.helpers import built_kernels, graphs
from tests.helpers.plan_driver import PlanDriver, Sequence
from tests.helpers.rank_pool import RankGroup, RankPool
from tests.helpers.tiny_models import (
    ARCHITECTURES,
    clear_prompts,
    greedy_tokens,
    plain_logits,
    tiny_model,
)
from tests.helpers.worker_settings import SPEC, loaded_worker, worker_config
from workers.parallel import Place
from workers.pipeline_parallel import stage_layers
from workers.resources import CPU_KV_BYTES

NUM_TOKENS = 12

pytestmark = pytest.mark.timeout(240)

Start = Callable[..., RankGroup]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


@pytest.fixture
def start(pool: RankPool, directory: Path, tmp_path: Path) -> Start:
    """Start the ranks of an engine on an architecture's tiny model."""
    numbers = itertools.count()

    def start(name: str, tp: int, pp: int, spec: KVCacheSpec = SPEC) -> RankGroup:
        config = worker_config(tiny_model(name, directory), tp=tp, pp=pp)
        return pool.start(config, spec, str(tmp_path / f"rendezvous-{next(numbers)}"))

    return start


@pytest.mark.parametrize("refusing_rank", [None, 1])
def test_ranks_capture_all_or_none(
    pool: RankPool, directory: Path, tmp_path: Path, refusing_rank: int | None
) -> None:
    """Also where one notices only when some sizes are captured; the answers are the same."""
    built_kernels.backend()
    folder = tiny_model("llama", directory)
    prompts = clear_prompts(folder, 5, NUM_TOKENS)
    config = worker_config(
        folder, tp=2, dtype="bfloat16", kernel_cache_dir=built_kernels.cache_dir()
    )
    answers = []
    for number, prepare in enumerate((None, partial(graphs.capture, refusing_rank=refusing_rank))):
        ranks = pool.start(config, SPEC, str(tmp_path / f"rendezvous-{number}"), prepare)
        sequences = [Sequence(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
        answers.append(PlanDriver(ranks.execute).run(sequences, arrivals_per_step=2))
    for rank in range(2):
        ranks.send(rank, "_runner._batch._graph_sizes.__len__")
        assert bool(ranks.receive(rank)) == (refusing_rank is None)

    assert answers[0] == answers[1]


def test_ranks_agree_if_all_of_them_say_yes(start: Start) -> None:
    """One that does not is enough, and all hear of it."""
    ranks = start("llama", 2, 2)
    for votes in ([True] * 4, [True, True, False, True]):
        for rank, vote in enumerate(votes):
            ranks.send(rank, "_parallel.all_agree", vote)
        assert ranks.receive_all() == [all(votes)] * 4


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_transformers(
    start: Start, directory: Path, name: str, tp: int, pp: int
) -> None:
    """20 prompts in a mixed batch with chunked prefill and preemptions, over several ranks."""
    prompts = clear_prompts(tiny_model(name, directory), 20, NUM_TOKENS)
    driver = PlanDriver(start(name, tp, pp).execute)

    outputs = driver.run(
        [Sequence(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)],
        chunk=9,
        arrivals_per_step=4,
        preempt_at={5, 7, 11},
    )

    model = tiny_model(name, directory)
    assert outputs == [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in prompts]


def test_four_ranks_share_one_kv_head(start: Start, directory: Path) -> None:
    """Gemma's single KV head is on every rank, each with one query head; two heads go to two ranks
    each."""
    for name in ("gemma3", "llama"):
        (prompt,) = clear_prompts(tiny_model(name, directory), 1, NUM_TOKENS)
        output = PlanDriver(start(name, 4, 1).execute).run([Sequence("a", prompt, NUM_TOKENS)])
        assert output == [greedy_tokens(tiny_model(name, directory), prompt, NUM_TOKENS)]


def test_weights_and_cache_are_divided(start: Start, directory: Path) -> None:
    """Two ranks hold about half of the weights each, and half of the KV heads."""
    whole = loaded_worker(worker_config(tiny_model("llama", directory))).load()
    for report in start("llama", 2, 1).reports:
        assert report.kv_bytes_per_token == whole.kv_bytes_per_token // 2
        assert report.weight_bytes < 0.65 * whole.weight_bytes  # its embedding is whole: not tied
        assert report.vocab_size == whole.vocab_size
        assert report.kv_budget_bytes <= CPU_KV_BYTES
    for report in start("gemma3", 2, 1).reports:
        assert report.kv_bytes_per_token == 2 * 32 * 4 * 4  # the one head, on both ranks


def test_stages_hold_their_own_layers(start: Start, directory: Path) -> None:
    """A pipeline stage has weights and KV of its layers only; together they have them all."""
    whole = loaded_worker(worker_config(tiny_model("llama", directory))).load()
    first, last = start("llama", 1, 2).reports
    assert first.weight_bytes + last.weight_bytes == whole.weight_bytes
    assert first.kv_bytes_per_token == 2 * last.kv_bytes_per_token


def test_a_stage_begins_its_next_step_while_the_following_one_works(start: Start) -> None:
    """The first stage answers two steps before the second has been given the first of them."""
    group = start("llama", 1, 2)
    driver = PlanDriver(group.execute)
    sequences = [Sequence("a", [7] * 20, 1), Sequence("b", [8] * 30, 1)]
    plans = [driver.plan([sequence]) for sequence in sequences]

    for plan in plans:
        group.send(0, "execute_model", plan)
        assert group.receive(0) is None
    for plan, sequence in zip(plans, sequences, strict=True):
        group.send(1, "execute_model", plan)
        driver.take(group.receive(1), {sequence.request_id: sequence})

    alone = PlanDriver(start("llama", 1, 2).execute)
    assert [s.output for s in sequences] == alone.run(
        [Sequence("a", [7] * 20, 1), Sequence("b", [8] * 30, 1)]
    )


def test_prompt_logprobs_come_from_all_tensor_ranks(start: Start, directory: Path) -> None:
    """The vocabulary is split, and put together again for those who ask about the prompt."""
    prompt = list(range(50, 70))
    wanted = SamplingParams(temperature=0.0, prompt_logprobs=0)
    sequence = Sequence("a", prompt, 1, params=wanted)
    PlanDriver(start("qwen2", 2, 1).execute).run([sequence])
    truth = plain_logits(tiny_model("qwen2", directory), prompt).log_softmax(-1)[:-1]
    found = torch.from_numpy(sequence.prompt_logprobs[0].logprobs.copy())
    ids = torch.tensor(prompt[1:])[:, None]
    torch.testing.assert_close(found, truth.gather(1, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "message"),
    [
        ("llama", 3, 1, "--tensor-parallel-size 3 does not divide the model's 4 attention heads"),
        ("qwen2", 1, 3, "--pipeline-parallel-size 3 is more than the model's 2 layers"),
    ],
)
def test_a_split_that_does_not_work_is_refused(
    start: Start, name: str, tp: int, pp: int, message: str
) -> None:
    """The line says which number does not fit the model."""
    with pytest.raises(ConfigError, match=message):
        start(name, tp, pp)


@pytest.mark.parametrize("num_layers", [4, 5, 7])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
def test_stages_cover_all_layers(num_layers: int, pp_size: int) -> None:
    """Each layer is on one stage, in order, and none has two more than another."""
    stages = [stage_layers(num_layers, Place(0, 1, rank, pp_size)) for rank in range(pp_size)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_the_output_rank_is_the_one_the_engine_core_expects() -> None:
    """`Place` and `ParallelConfig` agree on who replies."""
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    output = [rank for rank in range(6) if Place.of(rank, config).is_output]
    assert output == [config.output_rank]
