"""Workers that answer each step at once and compute nothing, in the engine core's own process.

For `raywire bench schedule` and `wire`: what is measured is everything but the model.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    WireConfig,
)
from engine.executor import Executor
from engine.sampling_params import SamplingParams
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)
from engine.wire import EngineCoreRequest

BLOCK_SIZE = 16
VOCAB_SIZE = 1000
_TOKEN = 3
_MAX_LENGTH = 1 << 17
_KV_TOKENS = 1 << 22
"""Of the KV cache; a byte each, since nothing is in it."""


class InstantWorkers:
    """Implements `engine.executor.Executor`: token 3 for everybody who samples."""

    def __init__(self, kv_tokens: int = _KV_TOKENS) -> None:
        self._kv_tokens = kv_tokens
        self._missing: dict[str, int] = {}
        """Prompt tokens that a request has yet to compute."""

    def load(self) -> Sequence[WorkerReport]:
        length = min(_MAX_LENGTH, self._kv_tokens - BLOCK_SIZE)  # what it holds: no warning
        return [WorkerReport(0, "float32", VOCAB_SIZE, length, 1, self._kv_tokens)]

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None: ...

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        for request_id in plan.dropped_request_ids:
            self._missing.pop(request_id, None)
        for new in plan.new_requests:
            self._missing[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        sampling = []
        for request_id, count in plan.num_scheduled_tokens.items():
            self._missing[request_id] = max(0, self._missing[request_id] - count)
            if not self._missing[request_id]:
                sampling.append(request_id)
        future: Future[ModelRunnerOutput] = Future()
        tokens = np.full(len(sampling), _TOKEN, dtype="<u4")
        future.set_result(ModelRunnerOutput(plan.step, sampling, tokens))
        return future

    def sample(self, masks: TokenMasks) -> None:
        raise NotImplementedError("nobody asks for structured output here")

    def statistics(self) -> Sequence[WorkerStats]:
        return []

    def profile(self, is_start: bool, directory: str) -> None: ...

    def close(self) -> None: ...


def start_instant_workers(config: EngineConfig, on_failure: Callable[[str], None]) -> Executor:
    """What an engine process is handed in place of real workers."""
    return InstantWorkers()


def engine_config(wire: WireConfig | None = None) -> EngineConfig:
    """Settings of an engine core over instant workers, with prefix caching as by default."""
    return EngineConfig(
        model=ModelConfig(path="", model_type="instant"),
        wire=wire or WireConfig(request_addresses=(), output_addresses=()),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=1 << 17),
    )


def make_request(request_id: str, prompt: NDArray[np.uint32], max_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
