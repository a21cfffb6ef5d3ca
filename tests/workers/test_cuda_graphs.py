"""Decodes that are captured once and replayed give the tokens that they give one by one.

There is no GPU here. `Again` stands for a CUDA graph: a replay runs the captured call once more,
with the step of the capture, so that it computes the right thing only if all that changes lies in
memory that stays. What only a GPU can prove is in `tests/gpu/test_cuda_graphs.py`.
"""

import itertools
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.step import KVCacheSpec, SchedulerOutput
from tests.helpers import built_kernels
from tests.helpers.graphs import Again, Refuses
from tests.helpers.plan_driver import PlanDriver, Sequence
from tests.helpers.tiny_models import clear_prompts, tiny_model
from tests.helpers.worker_settings import SPEC, worker_config
from workers import cuda_graphs
from workers.causal_lm import CausalLM
from workers.cuda_graphs import CudaGraphs
from workers.input_batch import InputBatch, Step
from workers.parallel import Parallel, Place
from workers.worker import Worker

NUM_TOKENS = 12


@pytest.fixture(params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built_kernels.backend()  # their attention reads the layout's tensors, as that on a GPU does
    return tiny_model(request.param, tmp_path_factory.getbasetemp())


def worker(folder: Path, captures: bool) -> Worker:
    config = worker_config(folder, dtype="bfloat16", kernel_cache_dir=built_kernels.cache_dir())
    worker = Worker(config, rank=0, rendezvous="")
    worker.load()
    if captures:
        worker._graphs = worker._model.graphs  # type: ignore[attr-defined]
    worker.initialize_kv_cache(SPEC)
    return worker


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_CudaRecorder", Again)
    monkeypatch.setattr(Again, "num_replays", 0)


def outputs(worker: Worker, prompts: list[list[int]], preempts: bool) -> list[list[int]]:
    """Of requests that come and go, so that batches of all sizes run, between prefills."""
    driver = PlanDriver(worker.execute_model)
    sequences = [Sequence(f"r{i}", prompt, NUM_TOKENS + i % 5) for i, prompt in enumerate(prompts)]
    return driver.run(
        sequences, arrivals_per_step=2, preempt_at=range(5, 30, 3) if preempts else ()
    )


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("preempts", [False, True])
def test_replayed_decodes_give_the_same_tokens(folder: Path, preempts: bool) -> None:
    """Bit by bit: padding is nobody's, and nothing of the captured step is left."""
    prompts = clear_prompts(folder, 20, NUM_TOKENS)
    torch.set_num_threads(1)
    plain, captured = worker(folder, captures=False), worker(folder, captures=True)
    before = Again.num_replays

    assert outputs(captured, prompts, preempts) == outputs(plain, prompts, preempts)

    assert Again.num_replays > before
    plain.close()
    captured.close()


@pytest.mark.usefixtures("again")
def test_all_sizes_are_captured_before_the_first_request(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None costs a request the time of a capture; the log says what the start spent on it."""
    with caplog.at_level(logging.INFO):
        ready = worker(folder, captures=True)

    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert list(ready._model.graphs._captured) == sizes[::-1]  # type: ignore[attr-defined]
    assert f"decodes captured rank=0 sizes={sizes} s=" in caplog.text
    ready.close()


@pytest.mark.usefixtures("again")
def test_another_cache_is_captured_anew(folder: Path) -> None:
    """A graph reads the KV cache that it was captured with."""
    prompts = clear_prompts(folder, 4, NUM_TOKENS)
    torch.set_num_threads(1)
    ready = worker(folder, captures=True)
    expected = outputs(ready, prompts, preempts=False)

    ready.initialize_kv_cache(SPEC)

    assert outputs(ready, prompts, preempts=False) == expected
    ready.close()


def test_a_model_that_cannot_be_captured_runs_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without padding, with the right tokens, and with one warning, which says why and what to do:
    also where some sizes have been captured by then."""

    monkeypatch.setattr(cuda_graphs, "_CudaRecorder", Refuses)
    prompts = clear_prompts(folder, 5, NUM_TOKENS)
    torch.set_num_threads(1)
    plain, refused = worker(folder, captures=False), worker(folder, captures=True)

    assert outputs(refused, prompts, False) == outputs(plain, prompts, False)

    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "one by one (--enforce-eager" in warning
    assert warning.endswith("operation not permitted when stream is capturing")
    assert refused._runner is not None
    assert not refused._runner._batch._graph_sizes
    plain.close()
    refused.close()


def test_a_model_that_another_rank_cannot_capture_runs_as_it_is(
    folder: Path, again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks pad alike, or they would expect what others do not send."""
    votes = []
    monkeypatch.setattr(Parallel, "all_agree", lambda _, says_yes: votes.append(says_yes))

    ready = worker(folder, captures=True)

    assert votes == [True]
    assert ready._runner is not None
    assert not ready._runner._batch._graph_sizes
    ready.close()


def test_graphs_go_before_the_group_whose_collectives_they_hold(
    folder: Path, again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for them, for ever."""
    ready = worker(folder, captures=True)
    left = []
    graphs = ready._model.graphs  # type: ignore[attr-defined]
    monkeypatch.setattr(Parallel, "close", lambda _: left.append(len(graphs._captured)))
    assert graphs._captured

    ready.close()

    assert left == [0]


def test_what_is_on_its_way_to_the_next_stage_stays(folder: Path, again: None) -> None:
    """A stage is some steps ahead, and the states of a replay last until the next one."""
    ready = worker(folder, captures=False)
    model, sent = ready._model, list[Tensor]()
    assert isinstance(model, CausalLM)
    model._parallel = NextStage(sent)  # type: ignore[assignment]
    batch = InputBatch(SPEC, torch.device("cpu"), graph_sizes=[2])
    driver = PlanDriver(lambda _: None)
    with torch.inference_mode():
        for name in ("a", "b"):
            plan = driver.plan([Sequence(f"{name}{i}", [3 + ord(name) + i]) for i in range(2)])
            assert model.forward(_prepared(batch, plan), batch) is None
            if name == "a":
                (first,) = [states.clone() for states in sent]

    assert torch.equal(sent[0], first)
    assert not torch.equal(sent[1], first)
    model._parallel = ready._parallel  # type: ignore[assignment]
    ready.close()


class NextStage:
    """Keeps what it is sent, without copying: as a send does until it is done."""

    place = Place(0, 1, 0, 2)

    def __init__(self, sent: list[Tensor]) -> None:
        self.send = sent.append


def test_states_of_an_earlier_stage_are_read_where_the_first_ones_lay() -> None:
    """On later pipeline stages they come in new memory every time."""
    batch = InputBatch(SPEC, torch.device("cpu"), graph_sizes=[2])
    graphs = CudaGraphs(lambda _, received: _given(received) * 2, Again)
    driver = PlanDriver(lambda _: None)
    plan = driver.plan([Sequence("a", [3]), Sequence("b", [4])])
    step = _prepared(batch, plan)

    for number in range(3):
        received = torch.full((2, 5), float(number))
        assert torch.equal(graphs.run(step, received), received * 2)


@given(st.integers(1, 2000))
def test_little_of_a_step_is_padding(most: int) -> None:
    """Sizes ascend to the most there can be, or to the largest that is captured at all."""
    sizes = cuda_graphs.sizes(most)

    assert sizes[-1] == min(most, 512)
    for smaller, larger in itertools.pairwise(sizes):
        assert smaller < larger <= 2 * smaller


@given(st.integers(1, 40), st.integers(0, 39))
def test_a_decode_is_padded_by_its_last_request(num_reqs: int, longest: int) -> None:
    """Which then reads and writes what it does anyhow, and samples once; what is in place is as
    wide as can be."""
    batch = InputBatch(SPEC, torch.device("cpu"), graph_sizes=cuda_graphs.sizes(SPEC.max_num_seqs))
    driver = PlanDriver(lambda _: None)
    sequences = [Sequence(f"r{i}", [i + 1] * (1 + i % (longest + 1))) for i in range(num_reqs)]
    for sequence in sequences:  # but for their last token, all are computed
        sequence.num_computed = len(sequence.prompt) - 1
    step = _prepared(batch, driver.plan(sequences))
    size = step.num_tokens

    assert step.lies_in_place
    assert num_reqs <= size in cuda_graphs.sizes(SPEC.max_num_seqs)
    layout = step.layout
    assert layout.block_table.shape == (size, SPEC.max_model_len // SPEC.block_size)
    assert layout.max_seq_len == SPEC.max_model_len
    for tensor in (step.input_ids, step.positions, layout.seq_lens, layout.slot_mapping):
        assert len(tensor) == size
        assert (tensor[num_reqs:] == tensor[num_reqs - 1]).all()
    last = layout.block_table[num_reqs - 1]
    held = -(-len(sequences[-1].prompt) // SPEC.block_size)
    assert (layout.block_table[num_reqs:, :held] == last[:held]).all()
    assert step.sampling_ids == [s.request_id for s in sequences]
    assert step.sampling_rows.tolist() == list(range(num_reqs))


def test_only_decodes_of_a_size_lie_in_place() -> None:
    """A step with more than one token of a request, or more requests than the largest size, is
    computed as it is."""
    spec = KVCacheSpec(100, 4, max_model_len=32, max_num_seqs=8, max_num_batched_tokens=24)
    for prompts in ([[1], [2, 3]], [[1]] * 5):
        batch = InputBatch(spec, torch.device("cpu"), graph_sizes=[1, 2, 4])
        driver = PlanDriver(lambda _: None)
        step = _prepared(batch, driver.plan([Sequence(f"r{i}", p) for i, p in enumerate(prompts)]))
        assert not step.lies_in_place
        assert step.num_tokens == sum(map(len, prompts))


def _prepared(batch: InputBatch, plan: SchedulerOutput) -> Step:
    batch.update(plan)
    return batch.prepare(plan)


def _given(received: Tensor | None) -> Tensor:
    assert received is not None
    return received
