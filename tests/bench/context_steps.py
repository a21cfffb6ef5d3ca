"""A worker's steps behind contexts of different lengths, without computing these first.

    python -m tests.bench.context_steps --model FOLDER --contexts 128,512

The worker is told that so many tokens of a prompt are in the cache already, as after a hit in the
prefix cache; what stands there does not matter for the time. Prints milliseconds as JSON.
"""

import itertools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cluster import environment
from engine.step import KVCacheSpec
from tests.bench.bench_model import BLOCK_SIZE, make_driver, timed
from workers import resources

CHUNK = 256
"""Tokens of a prefill."""
_STEPS = 8
_PREFILLS = 3


@click.command(help=__doc__)
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--contexts", required=True, help="Tokens, the longest last.")
def main(model: Path, contexts: str) -> None:
    lengths = [int(word) for word in contexts.split(",")]
    room = lengths[-1] + CHUNK + _STEPS + BLOCK_SIZE
    spec = KVCacheSpec(
        num_blocks=2 * room // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=room,
        max_num_seqs=4,
        max_num_batched_tokens=2 * CHUNK,
    )
    cache_dir = environment.read(os.environ).cache_dir
    driver = make_driver(model, resources.available_cores(), str(cache_dir), spec)
    names = map(str, itertools.count())
    found = {
        "chunk": CHUNK,
        "decode_ms": [_decode_ms(driver, length, next(names)) for length in lengths],
        "prefill_ms": [
            statistics.median(_prefill_ms(driver, length, next(names)) for _ in range(_PREFILLS))
            for length in lengths
        ],
    }
    click.echo(json.dumps(found))


def _decode_ms(driver: Any, context: int, name: str) -> float:
    sequence = _behind(context, 1, name)
    driver.step([sequence])
    took_ms = statistics.median(_wall_ms(lambda: driver.step([sequence])) for _ in range(_STEPS))
    _drop(driver, sequence)
    return took_ms


def _prefill_ms(driver: Any, context: int, name: str) -> float:
    sequence = _behind(context, CHUNK, name)
    took_ms = _wall_ms(lambda: driver.step([sequence], budget=2 * CHUNK))
    _drop(driver, sequence)
    return took_ms


def _behind(context: int, num_new: int, name: str) -> Any:
    """A request of which the worker has all but the last tokens in its cache."""
    from tests.helpers.plan_driver import Sequence

    prompt = [1000 + place % 10_000 for place in range(context + num_new)]
    return Sequence(name, prompt, 1 << 30, num_computed=context)


def _wall_ms(call: Callable[[], object]) -> float:
    return timed(call)[0]


def _drop(driver: Any, sequence: Any) -> None:
    driver.drop(sequence)
    driver.step([])


if __name__ == "__main__":
    main()
