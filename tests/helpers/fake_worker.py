"""A worker without a model, for tests of the rings, the executor and the worker process.

It samples token `step` for every request of a plan. `Faults` says what goes wrong, and where. A
test passes `FakeWorkers(...)` as the executor's `make_worker`: it travels to the child process by
pickle, as start-up arguments do.
"""

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from engine.config import EngineConfig, ExecutorConfig, ModelConfig, ParallelConfig, WireConfig
from engine.errors import ConfigError
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)

DAWDLE_S = 1.0


@dataclass(frozen=True)
class Fault:
    """What happens on `rank` when it is asked for `method` (in step `step`, if it is a step)."""

    rank: int
    method: str
    what: Literal["raise", "config", "kill", "hang", "dawdle", "exit", "stop"]
    step: int = 0


@dataclass(frozen=True)
class FakeWorkers:
    """Makes the fake worker of each rank."""

    faults: tuple[Fault, ...] = ()
    output_bytes: int = 0
    """Size of an array that comes with every output, in `prompt_logprobs`' place."""

    def __call__(self, config: EngineConfig, rank: int, rendezvous: str) -> "FakeWorker":
        worker = FakeWorker(config, rank, rendezvous, self)
        worker.suffer("start")
        return worker


@dataclass
class FakeWorker:
    config: EngineConfig
    rank: int
    rendezvous: str
    script: FakeWorkers
    num_steps: int = 0
    profiles: list[str] = field(default_factory=list)
    unsampled: SchedulerOutput | None = None

    def load(self) -> WorkerReport:
        self.suffer("load")
        with open(self.rendezvous, "ab") as file:  # the ranks' meeting place can be opened
            file.write(b"x")
        return WorkerReport(
            rank=self.rank,
            dtype="float32",
            vocab_size=1000,
            model_max_len=4096,
            kv_bytes_per_token=64,
            kv_budget_bytes=1 << 20,
            description=os.environ.get("GLOO_SOCKET_IFNAME", ""),  # for a test of start-up
        )

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        self.suffer("initialize_kv_cache")

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        self.suffer("execute_model", plan.step)
        self.num_steps += 1
        assert self.unsampled is None
        if plan.awaits_masks:
            self.unsampled = plan
            return None
        return self._output(plan)

    def sample_tokens(self, masks: TokenMasks) -> ModelRunnerOutput | None:
        self.suffer("sample_tokens", masks.step)
        plan, self.unsampled = self.unsampled, None
        assert plan is not None
        assert plan.step == masks.step
        return self._output(plan)

    def _output(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        if self.rank != self.config.parallel.output_rank:
            return None
        request_ids = list(plan.num_scheduled_tokens)
        num_tokens = max(len(request_ids), self.script.output_bytes // 4)
        return ModelRunnerOutput(
            step=plan.step,
            request_ids=request_ids,
            sampled_token_ids=np.full(num_tokens, plan.step, dtype="<u4"),
        )

    def statistics(self) -> WorkerStats:
        self.suffer("statistics")
        return WorkerStats(
            rank=self.rank,
            pid=os.getpid(),
            num_steps=self.num_steps,
            rss_bytes=0,
            num_requests=0,
        )

    def profile(self, is_start: bool, directory: str) -> None:
        with open(os.path.join(directory, f"trace-{self.rank}"), "a"):
            pass

    def close(self) -> None:
        self.suffer("close")

    def suffer(self, method: str, step: int = 0) -> None:
        """Let happen what the script says for this call."""
        for fault in self.script.faults:
            if (fault.rank, fault.method, fault.step) != (self.rank, method, step):
                continue
            match fault.what:
                case "raise":
                    raise ValueError(f"boom on rank {self.rank}")
                case "config":
                    raise ConfigError("unknown architecture 'Foo'; try another model")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "exit":
                    os._exit(3)
                case "hang":
                    time.sleep(1000)
                case "dawdle":
                    time.sleep(DAWDLE_S)


def make_config(
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    executor: ExecutorConfig | None = None,
) -> EngineConfig:
    """Settings of an engine core without sockets, and with small rings."""
    return EngineConfig(
        model=ModelConfig(path="/nowhere", model_type="fake"),
        wire=WireConfig(request_addresses=(), output_addresses=()),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        ),
        executor=executor or ExecutorConfig(ring_chunk_bytes=1 << 20),
    )


def make_plan(step: int, *request_ids: str) -> SchedulerOutput:
    return SchedulerOutput(step, dict.fromkeys(request_ids or ("a",), 1))
