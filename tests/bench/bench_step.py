"""What a step costs beside the model, planned ahead or not: an engine core and one worker process
with the scripted model, which sleeps for as long as a model would compute.

    python -m tests.bench.bench_step [--running 1,16,32,256] [--step-ms 5] [--temperature 0.0]

Both engines are there at once and take turns, so that a busy machine is as busy for either. Medians
of steps that decode:

    gap       from the end of a step in the worker to the beginning of the next: it has no work
    beside    from one step's beginning to the next one's, less the model's time
    core      processor time of the engine core's thread, outputs encoded
    worker    processor time of the worker's main thread, less the model's
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from cluster.bench import machine
from cluster.bench.instant_workers import make_request
from cluster.scripted_source import scripted_folder
from engine.codec import Encoder
from engine.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
    WireConfig,
)
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.step import KVCacheSpec, ModelRunnerOutput, SchedulerOutput
from workers import rpc
from workers.executor import MultiprocExecutor
from workers.input_batch import InputBatch, Step
from workers.worker import Worker

PROMPT_TOKENS = 32
NOT_STEADY = 5
"""Steps at the beginning and at the end of a round that do not count."""

Stamps = NDArray[np.int64]
"""`[num_steps, 4]`: began, ended, the model's time, processor time without it. Nanoseconds."""


class TimedWorker(Worker):
    """A worker that writes down what it does when."""

    def __init__(self, config: EngineConfig, path: str) -> None:
        super().__init__(config, rank=0, rendezvous="")
        torch.set_num_threads(1)  # this module has loaded torch before anybody could say so
        self._path = path
        self._stamps: list[tuple[int, int, int, int]] = []
        self._model_ns = 0
        self._model_cpu_ns = 0

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        super().initialize_kv_cache(spec)
        model = self._model
        forward, logits = model.forward, model.logits

        def timed_forward(step: Step, batch: InputBatch) -> torch.Tensor | None:
            began = self._now()
            states = forward(step, batch)
            self._note_model(began)
            return states

        def timed_logits(states: torch.Tensor) -> torch.Tensor | None:
            began = self._now()
            found = logits(states)
            self._note_model(began)
            return found

        model.forward, model.logits = timed_forward, timed_logits  # type: ignore[method-assign]

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        began, cpu_began = self._now()
        self._model_ns = self._model_cpu_ns = 0
        output = super().execute_model(plan)
        ended, cpu_ended = self._now()
        cpu_ns = cpu_ended - cpu_began - self._model_cpu_ns
        self._stamps.append((began, ended, self._model_ns, cpu_ns))
        return output

    def close(self) -> None:
        np.save(self._path, np.array(self._stamps, np.int64).reshape(-1, 4))
        super().close()

    def _now(self) -> tuple[int, int]:
        return time.monotonic_ns(), time.thread_time_ns()

    def _note_model(self, began: tuple[int, int]) -> None:
        now, cpu = self._now()
        self._model_ns += now - began[0]
        self._model_cpu_ns += cpu - began[1]


@dataclass(frozen=True)
class TimedWorkers:
    """Makes the worker, in its process."""

    path: str

    def __call__(self, config: EngineConfig, rank: int, rendezvous: str) -> rpc.Worker:
        return TimedWorker(config, self.path)


@dataclass
class Engine:
    """One engine core, its worker, and when it had its rounds."""

    is_ahead: bool
    core: EngineCore
    path: Path
    rounds: list[tuple[int, int]] = field(default_factory=list)
    core_us: list[float] = field(default_factory=list)

    def run(self, count: int, steps: int, temperature: float) -> None:
        """One round: that many requests, that many steps."""
        params = SamplingParams(temperature=temperature, max_tokens=steps)
        for number in range(count):
            prompt = np.random.default_rng(number).integers(0, 9, PROMPT_TOKENS, dtype=np.uint32)
            request = make_request(f"request-{number:032d}", prompt, steps)
            request = msgspec.structs.replace(request, sampling_params=params)
            self.core.add(self.core.prepare(request))
        encoder, buffer = Encoder(), bytearray()
        began, cpu_began = time.monotonic_ns(), time.thread_time()
        while self.core.has_work():
            for outputs in self.core.step(lambda: None).values():
                encoder.encode_into(outputs, buffer)
        self.core_us.append((time.thread_time() - cpu_began) / steps * 1e6)
        self.rounds.append((began, time.monotonic_ns()))

    def figures(self) -> list[float]:
        """Gap, beside and worker, in microseconds: medians. After the worker has ended."""
        stamps = np.load(self.path)
        parts = [self._of_round(stamps, began, ended) for began, ended in self.rounds]
        return [float(np.median(np.concatenate(each)) / 1e3) for each in zip(*parts, strict=True)]

    @staticmethod
    def _of_round(stamps: Stamps, began: int, ended: int) -> tuple[Stamps, Stamps, Stamps]:
        inside = stamps[(stamps[:, 0] > began) & (stamps[:, 1] < ended)][NOT_STEADY:-NOT_STEADY]
        gaps = inside[1:, 0] - inside[:-1, 1]
        beside = inside[1:, 0] - inside[:-1, 0] - inside[:-1, 2]
        return gaps, beside, inside[:, 3]


def start(folder: Path, is_ahead: bool, path: Path) -> Engine:
    config = EngineConfig(
        model=ModelConfig(path=str(folder), model_type="scripted"),
        wire=WireConfig(request_addresses=(), output_addresses=()),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(
            max_num_seqs=1024, max_num_batched_tokens=1 << 16, async_scheduling=is_ahead
        ),
        executor=ExecutorConfig(num_threads=1),
        log_level="WARNING",
    )
    executor = MultiprocExecutor(config, lambda cause: None, TimedWorkers(str(path)))
    return Engine(is_ahead, EngineCore(config, executor), path)


def measure(
    folder: Path, scratch: Path, count: int, *, steps: int, rounds: int, temperature: float
) -> None:
    engines = [start(folder, is_ahead, scratch / f"{is_ahead}.npy") for is_ahead in (False, True)]
    try:
        for _ in range(rounds):
            for engine in engines:
                engine.run(count, steps, temperature)
    finally:
        for engine in engines:
            engine.core.close()
    for engine in engines:
        gap, beside, worker = engine.figures()
        mode = "ahead" if engine.is_ahead else "plain"
        cells = [gap, beside, float(np.median(engine.core_us)), worker]
        click.echo(f"{count:>8}  {mode:6}" + "".join(f"{cell:>10.0f}" for cell in cells))


def _counts(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


@click.command(help=__doc__)
@click.option("--running", default="1,16,32,256", show_default=True)
@click.option("--step-ms", default=5.0, show_default=True)
@click.option("--steps", default=200, show_default=True)
@click.option("--rounds", default=4, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
def main(running: str, step_ms: float, steps: int, rounds: int, temperature: float) -> None:
    script = {"kind": "cycle", "token_ids": [5, 6], "step_delay_s": step_ms / 1e3}
    with tempfile.TemporaryDirectory() as scratch, machine.watch() as load:
        folder = scripted_folder(Path(scratch), script)
        click.echo("microseconds, medians")
        click.echo(
            " running  mode  " + "".join(f"{n:>10}" for n in ("gap", "beside", "core", "worker"))
        )
        for count in _counts(running):
            measure(
                *(folder, Path(scratch), count),
                **{"steps": steps, "rounds": rounds, "temperature": temperature},  # type: ignore[arg-type]
            )
    click.echo(f"others had {load.others:.0%} of the cores meanwhile")


if __name__ == "__main__":
    main()
