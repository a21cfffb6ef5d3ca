"""What the choice of a rank costs an API server, per request.

    python -m tests.bench.bench_route

16 ranks, 100,000 tracked prefixes, prompts that are not in the processor's caches. "new" has
nothing in common with what is tracked, "known" is the same prompt again. Median of 200 prompts, in
microseconds of the thread's own CPU time, so that other work on the machine counts little. Then
what the index takes when it is full, which it never exceeds.
"""

import statistics
import time
import tracemalloc

import click
import numpy as np

from api.load_balancer import LoadBalancer
from api.prefix_index import MAX_PREFIXES, PrefixIndex
from engine.codec import Array

NUM_RANKS = 16
BLOCK_SIZE = 16
NUM_TRACKED = 100_000
NUM_PROMPTS = 200
CACHE_TOKENS = 1 << 20


def make_prompt(random: np.random.Generator, num_tokens: int) -> Array:
    return random.integers(0, 1 << 17, num_tokens).astype("<u4")


def make_balancer(random: np.random.Generator) -> LoadBalancer:
    """With as many prefixes as it takes, all ranks about equally busy."""
    balancer = LoadBalancer(NUM_RANKS)
    for rank in range(NUM_RANKS):
        balancer.mark_up(rank, BLOCK_SIZE, CACHE_TOKENS)
    while balancer.num_tracked_prefixes < NUM_TRACKED:
        balancer.choose(make_prompt(random, 1000))
    return balancer


def measure(balancer: LoadBalancer, prompts: list[Array]) -> float:
    times = []
    for number, prompt in enumerate(prompts):
        began = time.thread_time_ns()
        route = balancer.choose(prompt, session=f"session-{number}", salt=("tenant", None))
        times.append(time.thread_time_ns() - began)
        balancer.finish(route.rank)
    return statistics.median(times) / 1e3


def full_index_mb(random: np.random.Generator) -> float:
    tracemalloc.start()
    index = PrefixIndex(NUM_RANKS, BLOCK_SIZE)
    number = 0
    while len(index) < MAX_PREFIXES:
        index.claim(number % NUM_RANKS, index.keys(make_prompt(random, 8000)))
        number += 1
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / 1e6


@click.command(help=__doc__)
def main() -> None:
    random = np.random.default_rng(0)
    balancer = make_balancer(random)
    click.echo("prompt tokens     new   known")
    for num_tokens in (1000, 8000, 100_000):
        prompts = [make_prompt(random, num_tokens) for _ in range(NUM_PROMPTS)]
        new, known = measure(balancer, prompts), measure(balancer, prompts)
        click.echo(f"{num_tokens:13d} {new:7.1f} {known:7.1f}")
    click.echo(f"full index, {MAX_PREFIXES} prefixes: {full_index_mb(random):.1f} MB")


if __name__ == "__main__":
    main()
