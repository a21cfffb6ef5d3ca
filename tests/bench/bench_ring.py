"""How fast wire 2 is, and what it costs at rest. `python -m tests.bench.bench_ring`.

Round trip: a payload one way to all readers, two bytes back from the first of them over a ring
of its own. `step` is the executor's whole way: plan, encode, ring, decode, a
worker that does nothing, and back to the future. Compare with section C of the performance anchors
only as ratios, in one run on one machine.
"""

import contextlib
import statistics
import time
from multiprocessing.connection import Connection

import click
import psutil

from engine.config import ExecutorConfig
from tests.helpers import ring_processes
from tests.helpers.fake_worker import FakeWorkers, make_config, make_plan
from workers.executor import MultiprocExecutor
from workers.ring import Peer, Ring, RingReader, RingWriter

PATIENCE_S = 60.0
CHUNK_BYTES = 16 << 20
ROUNDS = {"1 KiB": (1 << 10, 5000), "64 KiB": (1 << 16, 3000), "1 MiB": (1 << 20, 500)}
ROUNDS["12 MiB"] = (12 << 20, 60)


def read_all(pipe: Connection, calls: Ring, index: int, answers: Ring | None) -> None:
    """Read until the ring is closed, and answer each message if there is a ring for answers."""
    reader = RingReader(calls, index, Peer("bench"))
    writer = RingWriter(answers, [Peer("bench")]) if answers else None
    with contextlib.suppress(EOFError):
        while True:
            reader.read(timeout_s=PATIENCE_S)
            if writer is not None:
                writer.write([b"ok"], "", timeout_s=PATIENCE_S)


class Bench:
    """A broadcast ring and processes that read from it, the first of which answers."""

    def __init__(self, num_readers: int, stack: contextlib.ExitStack) -> None:
        calls = Ring.create(num_chunks=10, chunk_bytes=CHUNK_BYTES, num_readers=num_readers)
        answers = Ring.create(num_chunks=4, chunk_bytes=CHUNK_BYTES, num_readers=1)
        for ring in (calls, answers):
            stack.enter_context(contextlib.closing(ring))
        self.children = [
            stack.enter_context(
                ring_processes.start(f"reader {i}", read_all, calls, i, answers if i == 0 else None)
            )
            for i in range(num_readers)
        ]
        self.writer = RingWriter(calls, [child.peer for child in self.children])
        self.reader = RingReader(answers, 0, self.children[0].peer)

    def round_trip(self, payload: bytes) -> float:
        began_s = time.perf_counter()
        self.writer.write([payload], "", timeout_s=PATIENCE_S)
        self.reader.read(timeout_s=PATIENCE_S)
        return time.perf_counter() - began_s

    def idle_burn(self, seconds: float) -> float:
        """Cores used by all parked readers together."""
        processes = [psutil.Process(child.pid) for child in self.children]
        before_s = sum(sum(process.cpu_times()[:2]) for process in processes)
        time.sleep(seconds)
        return (sum(sum(process.cpu_times()[:2]) for process in processes) - before_s) / seconds


def row(name: str, samples_s: list[float]) -> str:
    cuts = statistics.quantiles(samples_s, n=100)
    p10, p50, p99 = (cuts[i] * 1e6 for i in (9, 49, 98))
    return f"{name:<28}{p10:>10.1f}{p50:>10.1f}{p99:>10.1f}"


def bench_ring(num_readers: int) -> None:
    with contextlib.ExitStack() as stack:
        bench = Bench(num_readers, stack)
        for name, (num_bytes, rounds) in ROUNDS.items():
            payload = bytes(num_bytes)
            for _ in range(20):
                bench.round_trip(payload)
            samples_s = [bench.round_trip(payload) for _ in range(rounds)]
            click.echo(row(f"{name}, {num_readers} reader(s)", samples_s))
        click.echo(f"idle burn, {num_readers} reader(s): {bench.idle_burn(2.0):.3f} cores")


def bench_steps(num_workers: int) -> None:
    config = make_config(tensor_parallel_size=num_workers, executor=ExecutorConfig())
    began_s = time.perf_counter()
    executor = MultiprocExecutor(config, lambda cause: None, FakeWorkers())
    start_s = time.perf_counter() - began_s
    with contextlib.closing(executor):
        samples_s = []
        for step in range(3000):
            began_s = time.perf_counter()
            executor.execute(make_plan(step)).result()
            samples_s.append(time.perf_counter() - began_s)
    click.echo(row(f"step, {num_workers} worker(s)", samples_s[100:]))
    click.echo(f"start of {num_workers} worker(s) without a model: {start_s:.2f} s")


@click.command()
def main() -> None:
    """Measure the rings and print a table."""
    began_s = time.perf_counter()
    ring = Ring.create(num_chunks=10, chunk_bytes=CHUNK_BYTES, num_readers=1)
    click.echo(f"reserving 160 MiB: {(time.perf_counter() - began_s) * 1000:.0f} ms")
    ring.close()
    click.echo(f"{'round trip':<28}{'p10 us':>10}{'p50 us':>10}{'p99 us':>10}")
    for num_readers in (1, 2):
        bench_ring(num_readers)
    for num_workers in (1, 2):
        bench_steps(num_workers)


if __name__ == "__main__":
    main()
