"""`raywire bench throughput`: many prompts handed to the `LLM` class at once."""

import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from api import LLM, SamplingParams
from cluster.bench import llm as bench_llm
from cluster.bench import machine
from cluster.bench.offline_run import token_range
from cluster.bench.results import Measured, Results
from cluster.bench.workload import Item, TokenRange, random_items, read_dataset, take


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings:
    """The flags of the command."""

    model: str
    num_prompts: int
    input_len: int
    output_len: int
    dataset: Path | None
    num_warmups: int
    repeats: int
    engine: Mapping[str, Any]
    """Arguments of `LLM`."""


@dataclass(frozen=True, slots=True)
class _Run:
    wall_s: float
    num_prompt_tokens: int
    num_tokens: int


def measure_throughput(settings: ThroughputSettings) -> Results:
    dataset = (
        None if settings.dataset is None else read_dataset(settings.dataset, settings.output_len)
    )
    noise = random.Random(settings.engine["seed"])
    with machine.watch() as load:
        with bench_llm.loaded(settings.model, settings.engine) as (llm, folder):
            ids = TokenRange(*token_range(str(folder)))

            def items(count: int) -> list[Item]:
                if dataset is not None:
                    return take(dataset, count)
                return random_items(count, settings.input_len, settings.output_len, ids, noise)

            if settings.num_warmups:
                _run(llm, items(settings.num_warmups))
            runs = [_run(llm, items(settings.num_prompts)) for _ in range(settings.repeats)]
    return Results(
        "throughput",
        {**asdict(settings), "dataset": settings.dataset and settings.dataset.name},
        [
            Measured("requests", "1/s", [[settings.num_prompts / each.wall_s] for each in runs]),
            Measured("output tokens", "1/s", [[each.num_tokens / each.wall_s] for each in runs]),
            Measured(
                "all tokens",
                "1/s",
                [[(each.num_prompt_tokens + each.num_tokens) / each.wall_s] for each in runs],
            ),
            Measured("whole run", "s", [[each.wall_s] for each in runs]),
        ],
        load,
    )


def _run(llm: LLM, items: list[Item]) -> _Run:
    prompts = [item.prompt for item in items]
    params = [
        SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True)
        for item in items
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - began
    return _Run(
        wall_s,
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(output.outputs[0].token_ids) for output in outputs),
    )
