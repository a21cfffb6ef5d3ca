"""Builders of engine cores over simulated workers, and a collector that plays all API servers."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.codec import unpack_tokens
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WireConfig,
)
from engine.core import EngineCore
from engine.executor import Executor
from engine.sampling_params import SamplingParams
from engine.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    EventKind,
    FinishReason,
    Logprobs,
    PrefillStats,
)
from tests.helpers.simulated_workers import SimulatedWorkers


def make_config(
    *,
    num_blocks: int | None = 64,
    block_size: int = 4,
    max_model_len: int | None = None,
    caching: bool = True,
    stages: int = 1,
    ahead: bool = False,
    **scheduler: Any,
) -> EngineConfig:
    """An engine with `num_blocks` usable blocks; `ahead` plans a step while one runs; `scheduler`
    are fields of SchedulerConfig."""
    return EngineConfig(
        model=ModelConfig(path="", model_type="simulated", max_model_len=max_model_len),
        wire=WireConfig(request_addresses=(), output_addresses=()),
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=caching,
            num_gpu_blocks_override=None if num_blocks is None else num_blocks + 1,
        ),
        scheduler=SchedulerConfig(async_scheduling=ahead, **scheduler),
        parallel=ParallelConfig(pipeline_parallel_size=stages),
    )


def make_request(
    request_id: str,
    prompt: Sequence[int] | int = 8,
    *,
    salt: str | None = None,
    output: Sequence[int] | None = None,
    client_index: int = 0,
    priority: int = 0,
    arrival_time: float = 0.0,
    vocab_size: int = 5,
    **sampling: Any,
) -> EngineCoreRequest:
    """A request; a number as prompt stands for that many tokens. `sampling` are SamplingParams."""
    tokens = range(prompt) if isinstance(prompt, int) else prompt
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=np.asarray([token % vocab_size for token in tokens], dtype="<u4"),
        mm_features=None,
        sampling_params=SamplingParams(**sampling),
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
        client_index=client_index,
        priority=priority,
        output_token_ids=None if output is None else np.asarray(output, dtype="<u4"),
    )


@dataclass
class Received:
    """All that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    clients: set[int] = field(default_factory=set)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        return [o.finish_reason for o in self.outputs if o.finish_reason is not None]

    @property
    def events(self) -> list[EventKind]:
        return [event.kind for event in self._events()]

    @property
    def times(self) -> list[float]:
        return [event.timestamp for event in self._events()]

    @property
    def prefill_stats(self) -> list[PrefillStats]:
        details = [o.details for o in self.outputs if o.details is not None]
        return [d.prefill_stats for d in details if d.prefill_stats is not None]

    @property
    def num_cached_tokens(self) -> int:
        (stats,) = self.prefill_stats
        return stats.num_cached_tokens

    @property
    def prompt_logprobs(self) -> list[Logprobs]:
        details = [o.details for o in self.outputs if o.details is not None]
        return [d.prompt_logprobs for d in details if d.prompt_logprobs is not None]

    @property
    def new_logprobs(self) -> list[Logprobs]:
        details = [o.details for o in self.outputs if o.details is not None]
        return [d.new_logprobs for d in details if d.new_logprobs is not None]

    def _events(self) -> Iterator[Any]:
        for output in self.outputs:
            if output.details is not None:
                yield from output.details.events or ()


class CoreUnderTest:
    """An EngineCore over simulated workers, with a clock that ticks once a look, so little that
    steps are planned ahead at once."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self.workers = SimulatedWorkers(limits=config.scheduler)
        ticks = itertools.count(1)
        self.core = EngineCore(config, executor or self.workers, clock=lambda: next(ticks) * 1e-9)
        self.received: dict[str, Received] = {}

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.core.add(self.core.prepare(request))

    def step(self, drain_aborts: Callable[[], None] = lambda: None) -> None:
        """One step, checked before and after; outputs go to `received`."""
        for client_index, outputs in self.core.step(drain_aborts).items():
            for output in outputs.outputs:
                received = self.received.setdefault(output.request_id, Received())
                received.outputs.append(output)
                received.clients.add(client_index)
                received.token_ids += unpack_tokens(output.new_token_ids)
        self.core.validate()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until there is no work left."""
        for _ in range(max_steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def scheduled(self, index: int = -1) -> dict[str, int]:
        """The tokens that a plan scheduled, by request."""
        return self.workers.plans[index].num_scheduled_tokens
