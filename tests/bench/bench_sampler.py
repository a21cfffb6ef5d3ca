"""Sampling a step, by what its requests ask for, beside a plain argmax and a plain softmax draw.

    python -m tests.bench.bench_sampler [--vocab 262144] [--threads 1]

Milliseconds, with our kernels, the least of several steps. Logits fall off as a language model's
do: a few tokens hold most of the probability, and the rest is a long tail.
"""

import os
import time
from collections.abc import Callable

import click
import numpy as np
import torch
from torch import Tensor

from cluster import environment
from engine.sampling_params import SamplingParams
from workers import native_build
from workers.sampler import Sampler

BATCHES = (1, 8, 32)
REPEATS = 9

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "min-p 0.1": SamplingParams(min_p=0.1),
    "top-p 0.9, temperature 4": SamplingParams(top_p=0.9, temperature=4.0),
    "greedy, penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5
    ),
    "greedy, logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}


@click.command(help=__doc__)
@click.option("--vocab", default=262_144, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    _show("", [f"batch {size}" for size in BATCHES])
    _show("(plain argmax)", [_time(_argmax, vocab, size) for size in BATCHES])
    _show("(plain softmax draw)", [_time(_plain_draw, vocab, size) for size in BATCHES])
    for name, params in CASES.items():
        _show(name, [_time(_sampling(params, vocab, size), vocab, size) for size in BATCHES])


def _time(step: Callable[[Tensor], object], vocab: int, size: int) -> str:
    generator = torch.manual_seed(0)
    logits = torch.randn(size, vocab, generator=generator) * 1.5
    # The best few stand out, each row's own.
    logits.scatter_add_(
        1,
        torch.randint(vocab, (size, 40), generator=generator),
        (16 - torch.arange(40).sqrt() * 1.5).repeat(size, 1),
    )
    least = float("inf")
    for _ in range(REPEATS):
        fresh = logits.clone()  # a step overwrites them
        began = time.perf_counter()
        step(fresh)
        least = min(least, time.perf_counter() - began)
    return f"{least * 1e3:.2f}"


def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _plain_draw(logits: Tensor) -> Tensor:
    noise = torch.empty_like(logits).exponential_()
    return logits.softmax(-1).div_(noise).argmax(-1)


def _sampling(params: SamplingParams, vocab: int, size: int) -> Callable[[Tensor], object]:
    cache_dir = environment.read(os.environ).cache_dir
    kernels = native_build.require(cache_dir, torch.get_num_threads())
    sampler = Sampler(vocab, size, torch.device("cpu"), 0, kernels)
    names = [str(row) for row in range(size)]
    prompt, nothing = np.arange(500, dtype=np.uint32), np.empty(0, np.uint32)
    for name in names:
        sampler.add(name, params, prompt, nothing)
    return lambda logits: sampler.sample(logits, names)


def _show(name: str, cells: list[str]) -> None:
    click.echo(f"{name:26}" + "".join(f"{cell:>10}" for cell in cells))


if __name__ == "__main__":
    main()
