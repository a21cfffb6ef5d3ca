"""What an engine core's own Python costs per step, without workers.

    python -m tests.bench.bench_schedule

Steady decode of requests with prompts of 128 tokens, block size 16, prefix caching on, replies
given at once. Columns as in the measurements of vLLM 0.32 that we compare with: `schedule`,
`update`, `encode` (the outputs for one API server), their sum; beside it the plan's own encoding,
admission of fresh requests, and hashing. Median of many steps, in microseconds of the thread's own
CPU time, so that other work on the machine counts little.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import click
import numpy as np

from engine.block_hash import hash_full_blocks, root_hash
from engine.codec import Encoder
from engine.core import EngineCore
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerReport,
    WorkerStats,
)
from engine.wire import EngineCoreOutputs
from tests.helpers.engine_core import make_config, make_request

T = TypeVar("T")

PROMPT_TOKENS = 128
NUM_STEPS = 200
VLLM_SUM_US = {1: 63.0, 32: 437.0, 256: 3245.0}
VLLM_HASH_US = 132.0
VLLM_ADMIT_32_US = 1750.0


class InstantWorkers:
    """Replies to each step at once, with token 3 for everybody who samples."""

    def __init__(self) -> None:
        self.missing: dict[str, int] = {}
        """Prompt tokens that a request has yet to compute."""

    def load(self) -> Sequence[WorkerReport]:
        return [WorkerReport(0, "float32", 1000, 4096, 1, 1 << 22)]

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None: ...

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        for new in plan.new_requests:
            self.missing[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        sampling = []
        for request_id, count in plan.num_scheduled_tokens.items():
            self.missing[request_id] = max(0, self.missing[request_id] - count)
            if not self.missing[request_id]:
                sampling.append(request_id)
        future: Future[ModelRunnerOutput] = Future()
        tokens = np.full(len(sampling), 3, dtype="<u4")
        future.set_result(ModelRunnerOutput(plan.step, sampling, tokens))
        return future

    def statistics(self) -> Sequence[WorkerStats]:
        return []

    def profile(self, is_start: bool, directory: str) -> None: ...

    def close(self) -> None: ...


def timed(times: list[float], run: Callable[[], T]) -> T:
    began = time.thread_time_ns()
    result = run()
    times.append((time.thread_time_ns() - began) / 1e3)
    return result


def make_core(num_requests: int) -> EngineCore:
    config = make_config(
        num_blocks=None, block_size=16, max_num_seqs=256, max_num_batched_tokens=1 << 16
    )
    core = EngineCore(config, InstantWorkers())
    for number in range(num_requests):
        prompt = np.random.default_rng(number).integers(0, 5, PROMPT_TOKENS).tolist()
        core.add(core.prepare(make_request(f"request-{number:032d}", prompt, max_tokens=2000)))
    return core


def update(
    core: EngineCore, plan: SchedulerOutput, reply: ModelRunnerOutput
) -> dict[int, EngineCoreOutputs]:
    core._scheduler.update(plan, reply)
    return core._collect()


def measure_decode(num_requests: int) -> dict[str, float]:
    core = make_core(num_requests)
    encoder, buffer = Encoder(), bytearray()
    names = ("schedule", "update", "encode", "plan")
    times: dict[str, list[float]] = {name: [] for name in names}
    core.step(lambda: None)  # the prompts
    scheduler, executor = core._scheduler, core.executor
    for _ in range(NUM_STEPS):
        plan = timed(times["schedule"], lambda: scheduler.schedule(time.monotonic()))
        assert plan is not None
        reply = executor.execute(plan).result()
        timed(times["plan"], lambda plan=plan: encoder.encode_into(plan, buffer))  # type: ignore[misc]
        outputs = timed(times["update"], lambda plan=plan, reply=reply: update(core, plan, reply))  # type: ignore[misc]
        timed(times["encode"], lambda outputs=outputs: encoder.encode_into(outputs[0], buffer))  # type: ignore[misc]
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians["sum"] = medians["schedule"] + medians["update"] + medians["encode"]
    return medians


def measure_admission(num_requests: int) -> float:
    """The first schedule of that many fresh requests."""
    times: list[float] = []
    for _ in range(20):
        core = make_core(num_requests)
        timed(times, lambda core=core: core._scheduler.schedule(time.monotonic()))  # type: ignore[misc]
    return statistics.median(times)


def measure_hashing(block_size: int) -> float:
    """Microseconds per 1,000 tokens of a prompt of 100,000."""
    tokens = np.random.default_rng(1).integers(0, 1 << 17, 100_000).astype("<u4").tobytes()
    times: list[float] = []
    for _ in range(20):
        timed(times, lambda: hash_full_blocks(root_hash(), tokens, block_size))
    return statistics.median(times) / 100


@click.command(help=__doc__)
def main() -> None:
    names = ("schedule", "update", "encode", "sum", "plan")
    click.echo("running " + " ".join(f"{name:>9}" for name in names) + "  vLLM sum")
    for num_requests, anchor in VLLM_SUM_US.items():
        medians = measure_decode(num_requests)
        row = " ".join(f"{medians[name]:9.1f}" for name in names)
        click.echo(f"{num_requests:7d} {row} {anchor:9.0f}")
    click.echo(f"admission of 32: {measure_admission(32):.0f} us (vLLM {VLLM_ADMIT_32_US:.0f})")
    for block_size in (16, 128):
        click.echo(f"hashing, block {block_size}: {measure_hashing(block_size):.1f} us/1k tokens")
    click.echo(f"(vLLM, block 16: {VLLM_HASH_US:.0f})")


if __name__ == "__main__":
    main()
