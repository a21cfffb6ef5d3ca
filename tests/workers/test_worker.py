"""One rank from load to close: budgets, limits, statistics, profile."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from engine.errors import ConfigError
from tests.helpers.plan_driver import PlanDriver, Sequence
from tests.helpers.tiny_models import tiny_model
from tests.helpers.worker_settings import SPEC, loaded_worker, worker_config
from workers import resources
from workers.resources import CPU_KV_BYTES
from workers.worker import Worker, _largest_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model("qwen2", tmp_path_factory.getbasetemp())


@pytest.fixture
def worker(folder: Path) -> Iterator[Worker]:
    worker = loaded_worker(worker_config(folder))
    yield worker
    worker.close()


def test_the_report_says_what_sizing_needs(folder: Path) -> None:
    """Length, vocabulary, dtype, and bytes of KV per token: layers × 2 × heads × size × 4."""
    report = Worker(worker_config(folder), 0, "").load()
    assert (report.rank, report.dtype, report.vocab_size) == (0, "float32", 389)
    assert report.model_max_len == 512
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert report.block_size == 16
    assert "attention=cpu linear=torch threads=1" in report.description


@pytest.mark.parametrize(
    ("free", "num_local_engines", "expected"),
    [
        (100 << 30, 1, CPU_KV_BYTES),
        (100 << 30, 4, CPU_KV_BYTES // 4),
        (2 << 30, 1, 1 << 29),
        (2 << 30, 2, 1 << 28),
    ],
)
def test_kv_budget_is_shared_among_the_engines_of_a_machine(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    num_local_engines: int,
    expected: int,
) -> None:
    """The smaller of 1 GiB and a quarter of free memory, over all of them."""
    monkeypatch.setattr(resources, "available_memory", lambda: free)
    config = worker_config(folder, num_local_engines=num_local_engines)
    assert Worker(config, 0, "").load().kv_budget_bytes == expected


def test_kv_budget_can_be_set(folder: Path) -> None:
    """`--kv-cache-memory-bytes` is taken as it is, per worker."""
    config = worker_config(folder, kv_cache_memory_bytes=12345, num_local_engines=3)
    assert Worker(config, 0, "").load().kv_budget_bytes == 12345


def test_a_cache_that_does_not_fit_is_refused(folder: Path) -> None:
    """Before anything is allocated, with both numbers."""
    worker = Worker(worker_config(folder), 0, "")
    worker.load()
    with pytest.raises(ConfigError, match=r"4294967296 blocks needs \d+.* GiB .* are available"):
        worker.initialize_kv_cache(msgspec.structs.replace(SPEC, num_blocks=1 << 32))


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_the_smallest_cache_is_warmed_up_within_its_bounds(folder: Path, num_blocks: int) -> None:
    """The warm-up writes to no block that is not there."""
    spec = msgspec.structs.replace(SPEC, num_blocks=num_blocks, block_size=1)
    assert loaded_worker(worker_config(folder), spec).statistics().num_steps == 0


def test_warm_up_leaves_no_trace(worker: Worker) -> None:
    """It has no row, and does not count as a step."""
    statistics = worker.statistics()
    assert (statistics.num_requests, statistics.num_steps) == (0, 0)


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_len", "lengths"),
    [
        (20, 4, 100, [17, 1, 1, 1]),
        (20, 4, 9, [9, 9, 1, 1]),
        (20, 4, 3, [3, 3, 3, 3]),
        (3, 8, 100, [1, 1, 1]),
        (8, 1, 7, [7]),
    ],
)
def test_the_largest_step_is_within_all_limits(
    num_tokens: int, num_seqs: int, max_len: int, lengths: list[int]
) -> None:
    """All requests that may run want logits, and the first ones have as much context as can be."""
    assert _largest_step(num_tokens, num_seqs, max_len) == lengths


def test_memory_is_measured_within_the_models_length(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has an embedding for each of its 512 positions, and a step has 2048 tokens. (What the
    allocator says needs a GPU.)"""
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    config = worker_config(tiny_model("gpt2", tmp_path_factory.getbasetemp()))
    worker = Worker(config, 0, "")
    report = worker.load()
    assert config.scheduler.max_num_batched_tokens > report.model_max_len
    worker._gpu_activation_bytes(report.model_max_len)


def test_statistics_count_steps_and_requests(worker: Worker) -> None:
    """What a worker knows about itself."""
    driver = PlanDriver(worker.execute_model)
    driver.step([Sequence("a", [5] * 4), Sequence("b", [6] * 4)])
    statistics = worker.statistics()
    assert (statistics.num_steps, statistics.num_requests) == (1, 2)
    assert statistics.pid == os.getpid()
    assert statistics.rss_bytes > 10 << 20


def test_profile_writes_one_trace_per_rank(worker: Worker, tmp_path: Path) -> None:
    """Chrome's format, in the directory that was asked for, with what ran in between."""
    directory = str(tmp_path)
    worker.profile(False, directory)  # nothing to stop
    worker.profile(True, directory)
    worker.profile(True, directory)  # it runs already
    PlanDriver(worker.execute_model).run([Sequence("a", [5] * 4, 2)])
    worker.profile(False, directory)

    (trace,) = tmp_path.iterdir()
    assert trace.name == "rank0.trace.json"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::linear" in names


def test_a_trace_that_cannot_be_written_does_not_hinder_the_next(
    worker: Worker, tmp_path: Path
) -> None:
    """Its folder may have gone meanwhile."""
    worker.profile(True, str(tmp_path))
    with pytest.raises(OSError, match=r"gone/rank0\.trace\.json cannot be written"):
        worker.profile(False, str(tmp_path / "gone"))

    worker.profile(True, str(tmp_path))
    worker.profile(False, str(tmp_path))

    assert (tmp_path / "rank0.trace.json").stat().st_size


def test_close_can_be_called_twice(folder: Path) -> None:
    """Also before anything was loaded, and while profiling."""
    Worker(worker_config(folder), 0, "").close()
    worker = loaded_worker(worker_config(folder))
    worker.profile(True, "")
    worker.close()
    worker.close()
    assert not torch._C._autograd._profiler_enabled()


def test_cuda_without_a_device_is_refused(folder: Path) -> None:
    """Rather than running on CPU, where somebody asked for a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        Worker(worker_config(folder, device="cuda"), 0, "").load()


def test_a_model_that_its_backend_cannot_serve_is_refused_at_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make_bidirectional: Callable[[Worker], None]
) -> None:
    """The warm-up makes each kind of call once, so that no request is the first to find out."""
    worker = Worker(worker_config(folder), 0, "")
    worker.load()
    make_bidirectional(worker)
    with pytest.raises(ConfigError, match="only causal models"):
        worker.initialize_kv_cache(SPEC)


@pytest.fixture
def make_bidirectional() -> Callable[[Worker], None]:
    def make(worker: Worker) -> None:
        for module in worker._model._backbone.modules():  # type: ignore[attr-defined]
            if hasattr(module, "is_causal"):
                module.is_causal = False

    return make


@pytest.mark.parametrize(
    ("num_cores", "num_local_engines", "is_free"), [(1, 1, False), (2, 1, True), (2, 2, False)]
)
def test_a_core_is_free_where_not_all_of_them_compute(
    num_cores: int,
    num_local_engines: int,
    is_free: bool,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one compute thread an engine, as here; the engine core plans ahead on such a core."""
    monkeypatch.setattr(resources, "available_cores", lambda: num_cores)
    folder = tiny_model("llama", tmp_path_factory.getbasetemp())
    worker = Worker(worker_config(folder, num_local_engines=num_local_engines), 0, "")
    assert worker.load().has_free_core == is_free
    worker.close()
