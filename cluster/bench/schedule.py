"""`raywire bench schedule`: what an engine core's own Python costs per step, without workers.

Steady decode of requests with prompts of 128 tokens, block size 16, prefix caching on, replies
given at once. `schedule`, `update`, `encode` (the outputs for one API server), their sum; beside it
the plan's own encoding, admission of fresh requests, and hashing. In microseconds of the thread's
own CPU time, so that other work on the machine counts little.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from cluster.bench import machine
from cluster.bench.instant_workers import BLOCK_SIZE, InstantWorkers, engine_config, make_request
from cluster.bench.results import Measured, Results
from engine.block_hash import hash_full_blocks, root_hash
from engine.codec import Encoder
from engine.core import EngineCore
from engine.step import ModelRunnerOutput, SchedulerOutput
from engine.wire import EngineCoreOutputs

T = TypeVar("T")

_PROMPT_TOKENS = 128
_PARTS = ("schedule", "update", "encode", "plan")
_HASHED_TOKENS = 100_000
_NUM_WARM_UP = 10
"""Steps before those that count."""
_NUM_TRIES = 20
"""Of what takes long: admission and hashing."""


def measure_schedule(running: Sequence[int], rounds: int, repeats: int) -> Results:
    figures: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    with machine.watch() as load:
        for _ in range(repeats):
            for count in running:
                for part, samples in decode_us(count, rounds).items():
                    figures[f"{part}, {count:,} running", "µs"].append(samples)
                figures[f"admission of {count:,}", "µs"].append(admission_us(count))
            for size in (BLOCK_SIZE, 128):
                figures[f"hashing, block {size}", "µs/1k tokens"].append(hashing_us(size))
    return Results(
        "schedule",
        {"running": list(running), "rounds": rounds, "repeats": repeats},
        [Measured(name, unit, samples) for (name, unit), samples in sorted_by_part(figures)],
        load,
        notes=["CPU time of the thread; a step is schedule + update + encode"],
    )


def sorted_by_part(
    figures: dict[tuple[str, str], list[list[float]]],
) -> list[tuple[tuple[str, str], list[list[float]]]]:
    """All counts of one part together, so that its growth is seen."""
    order = {part: index for index, part in enumerate(("step", *_PARTS))}
    return sorted(figures.items(), key=lambda item: order.get(item[0][0].partition(",")[0], 9))


def decode_us(
    count: int, rounds: int, prompt_tokens: int = _PROMPT_TOKENS
) -> dict[str, list[float]]:
    """Microseconds of each step of so many requests, by part; `step` is the sum."""
    rounds += _NUM_WARM_UP
    core = _make_core(count, rounds, prompt_tokens)
    encoder, buffer = Encoder(), bytearray()
    times: dict[str, list[float]] = {name: [] for name in _PARTS}
    core.step(lambda: None)  # the prompts
    scheduler, in_flight = core._scheduler, core._in_flight
    for _ in range(rounds):
        plan = _timed(times["schedule"], lambda: scheduler.schedule(time.monotonic()))
        assert plan is not None
        in_flight.append((plan, core.executor.execute(plan)))
        plan, future = in_flight.popleft()  # where steps are planned ahead, an older one
        reply = future.result()
        _timed(times["plan"], lambda plan=plan: encoder.encode_into(plan, buffer))  # type: ignore[misc]
        outputs = _timed(
            times["update"],
            lambda plan=plan, reply=reply: _update(core, plan, reply),  # type: ignore[misc]
        )
        _timed(times["encode"], lambda outputs=outputs: encoder.encode_into(outputs[0], buffer))  # type: ignore[misc]
    parts = zip(times["schedule"], times["update"], times["encode"], strict=True)
    found = {"step": [sum(each) for each in parts], **times}
    return {name: samples[_NUM_WARM_UP:] for name, samples in found.items()}


def _make_core(count: int, max_tokens: int, prompt_tokens: int = _PROMPT_TOKENS) -> EngineCore:
    core = EngineCore(engine_config(), InstantWorkers())
    for number in range(count):
        noise = np.random.default_rng(number)
        prompt = noise.integers(0, 5, prompt_tokens, dtype=np.uint32)
        request = make_request(f"request-{number:032d}", prompt, max_tokens + 2)
        core.add(core.prepare(request))
    return core


def _update(
    core: EngineCore, plan: SchedulerOutput, reply: ModelRunnerOutput
) -> dict[int, EngineCoreOutputs]:
    core._scheduler.update(plan, reply)
    return core._collect()


def admission_us(count: int) -> list[float]:
    """Microseconds of the first schedule of that many fresh requests."""
    times: list[float] = []
    for _ in range(_NUM_TRIES):
        core = _make_core(count, 1)
        _timed(times, lambda core=core: core._scheduler.schedule(time.monotonic()))  # type: ignore[misc]
    return times


def hashing_us(block_size: int) -> list[float]:
    """Microseconds for 1,000 tokens of a long prompt."""
    tokens = np.random.default_rng(1).integers(0, 1 << 17, _HASHED_TOKENS).astype("<u4").tobytes()
    times: list[float] = []
    for _ in range(_NUM_TRIES):
        _timed(times, lambda: hash_full_blocks(root_hash(), tokens, block_size))
    return [each / _HASHED_TOKENS * 1000 for each in times]


def _timed(times: list[float], run: Callable[[], T]) -> T:
    began = time.thread_time_ns()
    result = run()
    times.append((time.thread_time_ns() - began) / 1e3)
    return result
