"""`raywire bench latency`: batches through the `LLM` class, one after the other."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from api import LLM, SamplingParams
from cluster.bench import llm as bench_llm
from cluster.bench import machine
from cluster.bench.offline_run import Prompts, run
from cluster.bench.results import Measured, Results


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """The flags of the command."""

    model: str
    input_len: int
    output_len: int
    batch_size: int
    num_iters_warmup: int
    num_iters: int
    repeats: int
    engine: Mapping[str, Any]
    """Arguments of `LLM`."""


def measure_latency(settings: LatencySettings) -> Results:
    """Each batch is generated twice, from new prompts: one token, which is the prefill, and all.
    A decode step is what remains, by the tokens that remain."""
    with machine.watch() as load:
        with bench_llm.loaded(settings.model, settings.engine) as (llm, folder):
            prompts = Prompts(str(folder), settings.input_len, settings.engine["seed"])
            for _ in range(settings.num_iters_warmup):
                _iteration(llm, prompts, settings)
            repeats = [
                [_iteration(llm, prompts, settings) for _ in range(settings.num_iters)]
                for _ in range(settings.repeats)
            ]

    def figure(name: str, unit: str, index: int) -> Measured:
        return Measured(name, unit, [[values[index] for values in repeat] for repeat in repeats])

    figures = [figure("prefill", "ms", 0), figure("whole batch", "ms", 1)]
    if settings.output_len > 1:
        figures.append(figure("decode step", "ms", 2))
    figures.append(figure("output tokens", "1/s", 3))
    return Results("latency", asdict(settings), figures, load)


def _iteration(
    llm: LLM, prompts: Prompts, settings: LatencySettings
) -> tuple[float, float, float, float]:
    """Prefill, whole and decode step in milliseconds; output tokens a second."""
    size, length = settings.batch_size, settings.output_len
    prefill_s = run(llm, SamplingParams, prompts.take(size), 1)
    whole_s = run(llm, SamplingParams, prompts.take(size), length) if length > 1 else prefill_s
    step_s = (whole_s - prefill_s) / max(1, length - 1)
    return prefill_s * 1e3, whole_s * 1e3, step_s * 1e3, size * length / whole_s
