"""One worker's steps without engine, wires or scheduler: decode and prefill, kernels against torch,
or 8-bit integers against bfloat16.

    python -m tests.bench.bench_model [--compare kernels,torch] [--threads 2] [--rounds 5]
    python -m tests.bench.bench_model --compare int8,kernels

Both variants are loaded once and take turns, so that a crowd on the machine hits them alike. Wall
time is what a user sees; the processor time of all threads is what to read when others are at work
too: they stretch the one and hardly the other.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from cluster import environment
from cluster.bench import machine
from cluster.model_source import resolve
from engine.config import Quantization
from engine.step import KVCacheSpec
from tests.helpers.worker_settings import worker_config
from workers import resources

BLOCK_SIZE = 16
CONTEXT = 128
"""Tokens of each request before it decodes."""


@dataclass
class Took:
    """Milliseconds of one kind of step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@click.command(help=__doc__)
@click.option("--model", default="demo", show_default=True)
@click.option("--batches", default="1,8,32", show_default=True, help="Of decode steps.")
@click.option("--prompts", default="128,1024", show_default=True, help="Tokens of prefills.")
@click.option("--threads", default=resources.available_cores(), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=5, show_default=True, help="Decode steps in a round.")
@click.option(
    "--compare", default="kernels,torch", show_default=True, help="Of kernels, torch, int8."
)
def main(
    model: str,
    batches: str,
    prompts: str,
    threads: int,
    rounds: int,
    steps: int,
    compare: str,
) -> None:
    cache_dir = environment.read(os.environ).cache_dir
    folder = resolve(model, cache_dir=cache_dir)
    kernels_of: dict[str, str | None] = {"torch": None}
    quantizations: dict[str, Quantization | None] = {"int8": "int8"}
    spec = KVCacheSpec(
        num_blocks=1500,
        block_size=BLOCK_SIZE,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
    )
    drivers = {
        name: make_driver(
            *(folder, threads, kernels_of.get(name, str(cache_dir)), spec),
            quantization=quantizations.get(name),
        )
        for name in compare.split(",")
    }
    rows: dict[str, dict[str, Took]] = {}
    with machine.watch() as load:
        for _ in range(rounds):
            for name, driver in drivers.items():
                for label, measure in _cases(batches, prompts, steps):
                    took = rows.setdefault(label, {}).setdefault(name, Took())
                    for wall, cpu in measure(driver):
                        took.wall.append(wall)
                        took.cpu.append(cpu)
    click.echo(f"{machine.describe()}, {threads} threads; medians in ms, least in brackets")
    for label, found in rows.items():
        click.echo(_line(label, found))
    click.echo(f"others meanwhile: {load.others:.0%} of all cores")


def _line(label: str, found: dict[str, Took]) -> str:
    cells = [f"{label:14}"]
    for name, took in found.items():
        cells.append(f"{name} wall {statistics.median(took.wall):8.1f} ({min(took.wall):.1f})")
        cells.append(f"cpu {statistics.median(took.cpu):8.1f} ({min(took.cpu):.1f})")
    if len(found) == 2:
        ours, theirs = found.values()
        cells.append(
            f"ratio wall {statistics.median(theirs.wall) / statistics.median(ours.wall):.2f}"
        )
        cells.append(f"cpu {statistics.median(theirs.cpu) / statistics.median(ours.cpu):.2f}")
    return "  ".join(cells)


Measure = Callable[[Any], Iterator[tuple[float, float]]]


def _cases(batches: str, prompts: str, steps: int) -> Iterator[tuple[str, Measure]]:
    for size in map(int, batches.split(",")):
        yield f"decode {size}", partial(_decode, size=size, steps=steps)
    for length in map(int, prompts.split(",")):
        yield f"prefill {length}", partial(_prefill, length=length)


def make_driver(
    folder: Path,
    threads: int,
    kernel_cache_dir: str | None,
    spec: KVCacheSpec,
    quantization: Quantization | None = None,
) -> Any:
    """A worker in this process, with its model loaded, and who writes its plans."""
    config = worker_config(folder, quantization=quantization)
    executor = replace(config.executor, num_threads=threads, kernel_cache_dir=kernel_cache_dir)
    config = replace(config, executor=executor)
    resources.prepare_environment(config)
    # Here, because torch reads that environment when it is imported.
    from tests.helpers.plan_driver import PlanDriver
    from tests.helpers.worker_settings import loaded_worker

    worker = loaded_worker(config, spec)
    return PlanDriver(worker.execute_model, block_size=BLOCK_SIZE, num_blocks=spec.num_blocks)


def _sequences(count: int, length: int) -> list[Any]:
    from tests.helpers.plan_driver import Sequence

    source = random.Random(count * length)
    return [
        Sequence(f"{count}-{i}", source.choices(range(1000, 20000), k=length), 1 << 30)
        for i in range(count)
    ]


def _decode(driver: Any, size: int, steps: int) -> Iterator[tuple[float, float]]:
    sequences = _sequences(size, CONTEXT)
    driver.step(sequences, budget=1 << 20)
    driver.step(sequences)
    for _ in range(steps):
        yield timed(lambda: driver.step(sequences))
    _drop(driver, sequences)


def _prefill(driver: Any, length: int) -> Iterator[tuple[float, float]]:
    sequences = _sequences(1, length)
    yield timed(lambda: driver.step(sequences, budget=1 << 20))
    _drop(driver, sequences)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of wall and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def _drop(driver: Any, sequences: list[Any]) -> None:
    for sequence in sequences:
        driver.drop(sequence)
    driver.step([])


if __name__ == "__main__":
    main()
