"""One rank: its device, its groups, its part of the model and of the KV cache.

`process.py` makes one and calls its methods as messages arrive; `model_runner.py` does the steps.
The calls come in this order: `load`, `initialize_kv_cache`, any of the others, `close`.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)
from workers import cuda_graphs, resources, script, scripted
from workers.cuda_graphs import CudaGraphs
from workers.input_batch import InputBatch
from workers.kv_cache import check_fits
from workers.lean_imports import lean_imports
from workers.model_runner import Model, ModelRunner
from workers.native import Kernels
from workers.parallel import Parallel, Place
from workers.sampler import Sampler
from workers.supported import (
    SCRIPTED,
    SCRIPTED_KV_BYTES_PER_TOKEN,
    SCRIPTED_KV_CACHE_BYTES,
)

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 32
"""On CPU, enough to make every kind of call once."""

GPU_KV_SHARE = 0.9
"""Of a GPU's memory that is free after loading. CUDA graphs, among others, live in the rest."""


class Worker:
    """One rank of an engine.

    Args:
        config: the engine's.
        rank: ours, below `config.parallel.world_size`.
        rendezvous: a file path, the same for all ranks of the engine and new, where they meet.
    """

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str) -> None:
        self._config = config
        self._rank = rank
        self._rendezvous = rendezvous
        self._place = Place.of(rank, config.parallel)
        self._is_scripted = config.model.model_type == SCRIPTED
        self._device = torch.device("cpu")
        self._parallel: Parallel | None = None
        self._model: Model
        self._runner: ModelRunner | None = None
        self._kernels: Kernels | None = None
        self._graphs: CudaGraphs | None = None  # of decodes, if they are to be captured
        self._kv_bytes_per_token = 0
        self._num_steps = 0
        self._profiler: torch.profiler.profile | None = None

    def load(self) -> WorkerReport:
        """Choose the device, meet the other ranks, and load this rank's weights.

        Raises:
            ConfigError: the model cannot be loaded, or not split as asked. One line that says why.
        """
        began = time.monotonic()
        report = self._load_scripted() if self._is_scripted else self._load_causal_lm()
        self._kv_bytes_per_token = report.kv_bytes_per_token
        if (asked := self._config.cache.kv_cache_memory_bytes) is not None:
            report = msgspec.structs.replace(report, kv_budget_bytes=asked)
        report = msgspec.structs.replace(report, load_s=time.monotonic() - began)
        logger.info(
            "model loaded rank=%d weight_bytes=%d load_s=%.1f %s",
            self._rank,
            report.weight_bytes,
            report.load_s,
            report.description,
        )
        return report

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        """Allocate the KV cache, run a prefill and a decode once, and capture CUDA graphs.

        Raises:
            ConfigError: it does not fit into memory, or the model wants what its attention back end
                cannot do.
        """
        num_bytes = spec.num_blocks * spec.block_size * self._kv_bytes_per_token
        check_fits(num_bytes, self._free_memory(), f"a KV cache of {spec.num_blocks} blocks")
        sizes = self._graph_sizes(spec)
        self._runner = self._make_runner(spec, sizes)
        if self._graphs is not None and not self._capture(self._graphs, sizes, spec.block_size):
            self._runner = self._make_runner(spec)
        if not self._is_scripted:
            most = min(
                spec.max_num_batched_tokens,
                spec.max_model_len - 1,
                spec.num_blocks * spec.block_size - 1,
            )
            tokens = min(most, WARM_UP_TOKENS)
            if tokens > 0:
                self._runner.warm_up([tokens], spec.block_size)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step. Returns None except on `ParallelConfig.output_rank`; also there where the
        step awaits masks."""
        assert self._runner is not None, "execute_model comes after initialize_kv_cache"
        self._num_steps += 1
        return self._runner.execute(plan)

    def sample_tokens(self, masks: TokenMasks) -> ModelRunnerOutput | None:
        """Complete the step that awaits `masks`. Returns None except on
        `ParallelConfig.output_rank`."""
        assert self._runner is not None, "sample_tokens comes after execute_model"
        return self._runner.sample(masks)

    def statistics(self) -> WorkerStats:
        return WorkerStats(
            rank=self._rank,
            pid=os.getpid(),
            num_steps=self._num_steps,
            rss_bytes=resources.resident_memory(),
            num_requests=self._runner.num_requests if self._runner is not None else 0,
        )

    def profile(self, is_start: bool, directory: str) -> None:
        """Start the profiler, or stop it and write `rank<N>.trace.json` (Chrome's format) into
        `directory`. What is so already stays so.

        Raises:
            OSError: the trace cannot be written. The profiler has stopped all the same.
        """
        if is_start and self._profiler is None:
            profiler = torch.profiler.profile()
            profiler.start()
            self._profiler = profiler
        elif not is_start and self._profiler is not None:
            # Forgotten first: after a disk that was full, the next start is a new one.
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            trace = Path(directory, f"rank{self._rank}.trace.json")
            trace.unlink(missing_ok=True)
            profiler.export_chrome_trace(str(trace))
            if not trace.is_file():  # torch writes that on standard error and goes on
                raise OSError(f"{trace} cannot be written")

    def close(self) -> None:
        """Give up graphs and cache, and then leave the groups: NCCL waits for graphs that hold its
        collectives. Idempotent."""
        self._runner = None
        if self._graphs is not None:
            self._graphs.clear()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None

    def _load_scripted(self) -> WorkerReport:
        if self._config.executor.device == "cuda":
            _choose_device(self._config, self._rank)  # it has no use for one, but asks as all do
        config = script.read_config(Path(self._config.model.path))
        self._model = scripted.ScriptedModel(config, self._rank, self._place)
        return WorkerReport(
            rank=self._rank,
            dtype="float32",
            vocab_size=config.vocab_size,
            model_max_len=config.max_position_embeddings,
            kv_bytes_per_token=SCRIPTED_KV_BYTES_PER_TOKEN,
            kv_budget_bytes=SCRIPTED_KV_CACHE_BYTES,
            has_free_core=True,  # it sleeps
            description=f"device=cpu script={config.script.kind}",
        )

    def _load_causal_lm(self) -> WorkerReport:
        # transformers takes two to three seconds to import, which the scripted model need not wait
        # for.
        began = time.monotonic()
        with lean_imports():
            from workers import linear, loader, patcher, quantization
            from workers.attention import native
            from workers.attention.select import select_backend
            from workers.causal_lm import CausalLM

        imports_s = time.monotonic() - began
        settings = self._config
        self._device = _choose_device(settings, self._rank)
        torch.set_num_threads(resources.num_threads(settings))
        backend = select_backend(settings.executor.attention_backend, self._device)
        self._block_size = settings.cache.block_size or backend.block_size
        self._parallel = Parallel(
            self._place, self._rendezvous, self._device, settings.executor.execute_timeout_s
        )
        num_local = resources.num_local_workers(settings)
        loaded = loader.load(settings.model, self._parallel, self._device, num_local)
        began = time.monotonic()
        packed = linear.choose(
            *(loaded.dtype, self._device, settings.executor.kernel_cache_dir),
            *(torch.get_num_threads(), settings.executor.linear_backend),
            settings.model.quantization,
        )
        if packed is not None:
            patcher.patch(loaded.model, packed)
            self._kernels = packed.kernels
            if settings.executor.attention_backend is None and native.can_attend(loaded.config):
                backend = native.NativeAttention(packed.kernels)
        weight_bytes = loaded.weight_bytes
        if settings.model.quantization is not None:
            weight_bytes = quantization.weight_bytes(loaded.model)
        kernels_s = time.monotonic() - began
        self._model = model = CausalLM(loaded, self._parallel, backend, self._device)
        if (
            self._device.type == "cuda"
            and backend.can_be_captured
            and not settings.executor.enforce_eager
        ):
            self._graphs = model.graphs
        max_len = int(loaded.config.max_position_embeddings)
        return WorkerReport(
            rank=self._rank,
            dtype=str(loaded.dtype).removeprefix("torch."),
            vocab_size=model.vocab_size,
            model_max_len=max_len,
            kv_bytes_per_token=model.kv_shape.bytes_per_token * len(model.layers),
            kv_budget_bytes=self._kv_budget_bytes(max_len),
            block_size=self._block_size,
            has_free_core=self._has_free_core(),
            weight_bytes=weight_bytes,
            description=f"device={self._device} attention={backend.name}"
            f" linear={packed.name if packed else 'torch'}"
            f" threads={torch.get_num_threads()} layers={len(model.layers)}",
            imports_s=imports_s,
            kernels_s=kernels_s,
        )

    def _graph_sizes(self, spec: KVCacheSpec) -> list[int]:
        """Of decodes that run as CUDA graphs."""
        if self._graphs is None or spec.max_model_len < 2:
            return []
        blocks_of_each = 1 // spec.block_size + 1
        return cuda_graphs.sizes(
            min(
                spec.max_num_seqs,
                spec.max_num_batched_tokens,
                spec.num_blocks // blocks_of_each,
            )
        )

    def _capture(self, graphs: CudaGraphs, sizes: list[int], block_size: int) -> bool:
        """Run decodes of each size, the largest first: the others lie in its memory. Returns
        whether all ranks have captured all of them. They agree after each: one that captures and
        one that cannot go on with different numbers of collectives."""
        assert self._runner is not None
        assert self._parallel is not None
        began = time.monotonic()
        for size in reversed(sizes):
            self._runner.warm_up([1] * size, block_size)
            if not self._parallel.all_agree(not graphs.has_failed):
                return False
        took_s = time.monotonic() - began
        logger.info("decodes captured rank=%d sizes=%s s=%.1f", self._rank, sizes, took_s)
        return True

    def _make_runner(self, spec: KVCacheSpec, graph_sizes: Sequence[int] = ()) -> ModelRunner:
        self._model.allocate_kv_cache(spec)
        sampler = None
        if self._place.is_output:
            # Engines have noise of their own, or their unseeded answers would be alike.
            seed = self._config.model.seed + self._config.parallel.data_parallel_rank
            sampler = Sampler(
                *(self._model.vocab_size, spec.max_num_seqs, self._device, seed),
                kernels=self._kernels,
            )
        return ModelRunner(self._model, InputBatch(spec, self._device, graph_sizes), sampler)

    def _kv_budget_bytes(self, model_max_len: int) -> int:
        if self._device.type == "cuda":
            free = int(self._free_memory() * GPU_KV_SHARE)
            return max(0, free - self._gpu_activation_bytes(model_max_len))
        return resources.cpu_kv_budget(
            self._free_memory(),
            self._config.parallel.world_size,
            self._config.executor.num_local_engines,
        )

    def _has_free_core(self) -> bool:
        num_busy = torch.get_num_threads() * resources.num_local_workers(self._config)
        return self._device.type == "cuda" or num_busy < resources.available_cores()

    def _free_memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        return resources.available_memory()

    def _gpu_activation_bytes(self, model_max_len: int) -> int:
        """What the largest step needs beside weights and KV cache: measured, with a small cache."""
        scheduler, block_size = self._config.scheduler, self._block_size
        lengths = _largest_step(
            scheduler.max_num_batched_tokens, scheduler.max_num_seqs, model_max_len - 1
        )
        spec = KVCacheSpec(
            num_blocks=sum(length // block_size + 1 for length in lengths),
            block_size=block_size,
            max_model_len=model_max_len,
            max_num_seqs=len(lengths),
            max_num_batched_tokens=sum(lengths),
        )
        runner = self._make_runner(spec)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        runner.warm_up(lengths, block_size)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()
        return peak


def _largest_step(num_tokens: int, num_seqs: int, max_len: int) -> list[int]:
    """Prompt lengths of the step that needs the most memory: of as many requests as there may be,
    which all want logits, and the first of them as long as can be."""
    lengths = []
    for num_others in reversed(range(min(num_seqs, num_tokens))):
        lengths.append(min(max_len, num_tokens - num_others))
        num_tokens -= lengths[-1]
    return lengths


def _choose_device(config: EngineConfig, rank: int) -> torch.device:
    wanted = config.executor.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    index = config.executor.first_device + rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"worker {rank} of engine {config.parallel.data_parallel_rank} needs CUDA device"
            f" {index}, and there are {torch.cuda.device_count()}"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
