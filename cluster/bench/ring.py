"""`raywire bench ring`: how fast wire 2 is, and what it costs at rest.

Round trip: a payload one way to all readers, two bytes back from the first of them over a ring of
its own. `beside busy threads` is the same while as many processes compute as there are cores.
`step` is the executor's whole way: plan, encode, ring, decode, a worker that does nothing, and back
to the future.
"""

import contextlib
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess

import numpy as np

from cluster.bench import machine
from cluster.bench.busy import busy_threads
from cluster.bench.results import Measured, Results
from engine.config import EngineConfig, ModelConfig, ParallelConfig, WireConfig
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)
from workers.executor import MultiprocExecutor
from workers.ring import Peer, Ring, RingReader, RingWriter

_PATIENCE_S = 60.0
_READER_PATIENCE_S = 3600.0
"""Between two messages somebody else may be measured."""
_CHUNK_BYTES = 16 << 20
_NUM_WARM_UP = 20
_IDLE_S = 2.0
_SIZES = {"1 KiB": (1 << 10, 1.0), "64 KiB": (1 << 16, 0.5), "1 MiB": (1 << 20, 0.1)}
_SIZES["12 MiB"] = (12 << 20, 0.01)
"""Bytes, and the share of the rounds that such a size is worth."""

Samples = dict[str, list[list[float]]]
"""Microseconds by figure and repeat."""


def measure_ring(readers: Sequence[int], rounds: int, repeats: int) -> Results:
    trips: Samples = defaultdict(list)
    idle: dict[str, list[list[float]]] = {}
    with machine.watch() as load:
        for num_readers in readers:
            with contextlib.ExitStack() as stack:
                bench = RingBench(num_readers, stack)
                who = _so_many(num_readers, "reader")
                for _ in range(repeats):
                    for size, (num_bytes, share) in _SIZES.items():
                        samples = bench.round_trips_us(num_bytes, max(10, int(rounds * share)))
                        trips[f"{size}, {who}"].append(samples)
                with busy_threads():
                    name = f"1 KiB, {who}, beside busy threads"
                    trips[name] += [bench.round_trips_us(1 << 10, rounds) for _ in range(repeats)]
                name = f"idle, {who}"
                idle[name] = [[bench.idle_cores()] for _ in range(repeats)]
        for num_workers in readers:
            with contextlib.closing(_executor(num_workers)) as executor:
                name = f"step, {_so_many(num_workers, 'worker')}"
                trips[name] += [_steps(executor, rounds) for _ in range(repeats)]
    return Results(
        "ring",
        {"readers": list(readers), "rounds": rounds, "repeats": repeats},
        [
            *(Measured(name, "µs", samples) for name, samples in trips.items()),
            *(Measured(name, "cores", samples) for name, samples in idle.items()),
        ],
        load,
    )


def _so_many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"


class RingBench:
    """A broadcast ring and processes that read from it, the first of which answers."""

    def __init__(self, num_readers: int, stack: contextlib.ExitStack) -> None:
        calls = Ring.create(num_chunks=10, chunk_bytes=_CHUNK_BYTES, num_readers=num_readers)
        answers = Ring.create(num_chunks=4, chunk_bytes=_CHUNK_BYTES, num_readers=1)
        for ring in (calls, answers):
            stack.enter_context(contextlib.closing(ring))
        self._children = [
            stack.enter_context(_child(calls, index, answers if index == 0 else None))
            for index in range(num_readers)
        ]
        peers = [Peer(child.name, child.sentinel) for child in self._children]
        self._writer = RingWriter(calls, peers)
        self._reader = RingReader(answers, 0, peers[0])

    def round_trips_us(self, num_bytes: int, rounds: int) -> list[float]:
        """Microseconds of each."""
        payload = bytes(num_bytes)
        for _ in range(_NUM_WARM_UP):
            self._round_trip_us(payload)
        return [self._round_trip_us(payload) for _ in range(rounds)]

    def _round_trip_us(self, payload: bytes) -> float:
        began_s = time.perf_counter()
        self._writer.write([payload], "", timeout_s=_PATIENCE_S)
        self._reader.read(timeout_s=_PATIENCE_S)
        return (time.perf_counter() - began_s) * 1e6

    def idle_cores(self) -> float:
        """Cores used by all parked readers together."""

        def cpu_s() -> float:
            pids = [child.pid for child in self._children]
            return sum(machine.usage(pid).cpu_s for pid in pids if pid is not None)

        before_s = cpu_s()
        time.sleep(_IDLE_S)
        return (cpu_s() - before_s) / _IDLE_S


@contextlib.contextmanager
def _child(calls: Ring, index: int, answers: Ring | None) -> Iterator[BaseProcess]:
    """A reader, for as long as the block."""
    process = multiprocessing.get_context("spawn").Process(
        target=_read_all, args=(calls, index, answers), name=f"reader {index}"
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _read_all(calls: Ring, index: int, answers: Ring | None) -> None:
    """Read until the ring is closed, and answer each message if there is a ring for answers."""
    reader = RingReader(calls, index, Peer("bench"))
    writer = RingWriter(answers, [Peer("bench")]) if answers else None
    with contextlib.suppress(EOFError):
        while True:
            reader.read(timeout_s=_READER_PATIENCE_S)
            if writer is not None:
                writer.write([b"ok"], "", timeout_s=_PATIENCE_S)


# ------------------------------------------------------------------------------------------- steps


def _executor(num_workers: int) -> MultiprocExecutor:
    config = EngineConfig(
        model=ModelConfig(path="", model_type="idle"),
        wire=WireConfig(request_addresses=(), output_addresses=()),
        parallel=ParallelConfig(tensor_parallel_size=num_workers),
        log_level="WARNING",
    )
    return MultiprocExecutor(config, lambda cause: None, _IdleWorker)  # a step that fails raises it


def _steps(executor: MultiprocExecutor, rounds: int) -> list[float]:
    samples = []
    for step in range(_NUM_WARM_UP + rounds):
        began_s = time.perf_counter()
        executor.execute(SchedulerOutput(step, {"a": 1})).result()
        samples.append((time.perf_counter() - began_s) * 1e6)
    return samples[_NUM_WARM_UP:]


class _IdleWorker:
    """One rank without a model: token 0 for every request of a plan."""

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str) -> None:
        self._is_output_rank = rank == config.parallel.output_rank
        self._rank = rank

    def load(self) -> WorkerReport:
        return WorkerReport(self._rank, "float32", 1000, 4096, 64, 1 << 20)

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None: ...

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        if not self._is_output_rank:
            return None
        request_ids = list(plan.num_scheduled_tokens)
        tokens = np.zeros(len(request_ids), dtype="<u4")
        return ModelRunnerOutput(plan.step, request_ids, tokens)

    def sample_tokens(self, masks: TokenMasks) -> ModelRunnerOutput | None:
        raise NotImplementedError("nobody asks for structured output here")

    def statistics(self) -> WorkerStats:
        return WorkerStats(self._rank, os.getpid(), num_steps=0, rss_bytes=0, num_requests=0)

    def profile(self, is_start: bool, directory: str) -> None: ...

    def close(self) -> None: ...
