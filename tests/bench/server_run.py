"""A server as users start it: time until it answers, memory, idle load, streams, time to stop."""

import random
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.bench import server_process
from cluster.bench.http_load import Endpoint, LoadResult, run_load
from cluster.bench.machine import ProcessMemory, Tree
from cluster.bench.serve import completion_body
from cluster.bench.workload import TokenRange, random_items

IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Greedy completions of random prompts."""

    model: str
    prompt_tokens: int
    output_tokens: int
    ids: TokenRange


@dataclass(slots=True)
class Streams:
    """What clients see at one concurrency."""

    concurrency: int
    output_tokens_per_s: float
    first_token_ms: float
    between_tokens_ms: float
    between_tokens_p99_ms: float


@dataclass(slots=True)
class ServerResult:
    ready_s: float = 0.0
    """From starting the command to 200 on /health."""
    memory: list[ProcessMemory] = field(default_factory=list)
    idle_cores: float = 0.0
    streams: list[Streams] = field(default_factory=list)
    stop_s: float = 0.0
    """From SIGTERM to the end of the command."""


def vllm_command(python: str, model: str, port: int, limits: Sequence[str]) -> list[str]:
    module = "vllm.entrypoints.openai.api_server"
    return [python, "-m", module, "--model", model, "--port", str(port), *limits]


def measure_server(
    command: Sequence[str],
    environ: Mapping[str, str],
    port: int,
    workload: Workload,
    concurrencies: Sequence[int],
    log: Path,
) -> ServerResult:
    """Start a server, measure it, and stop it."""
    result = ServerResult()
    with server_process.started(command, environ, port, log) as (process, ready_s):
        result.ready_s = ready_s
        _load(port, workload, 1, 1)
        tree = Tree(process.pid)
        time.sleep(2.0)  # what spins for a moment after work may come to rest
        cpu_before = tree.cpu_s()
        time.sleep(IDLE_S)
        result.idle_cores = (tree.cpu_s() - cpu_before) / IDLE_S
        for concurrency in concurrencies:
            _load(port, workload, concurrency, concurrency)
            result.streams.append(_streams(port, workload, concurrency))
        result.memory = tree.memory()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        result.stop_s = time.monotonic() - began
    return result


def _load(port: int, workload: Workload, concurrency: int, num_requests: int) -> LoadResult:
    """Streams, `concurrency` at a time. All must give all their tokens."""
    noise = random.Random(concurrency)
    items = random_items(
        num_requests, workload.prompt_tokens, workload.output_tokens, workload.ids, noise
    )
    bodies = [completion_body(workload.model, item) for item in items]
    load = run_load(
        Endpoint("127.0.0.1", port, "/v1/completions"), bodies, max_concurrency=concurrency
    )
    if load.num_tokens != num_requests * workload.output_tokens:
        raise RuntimeError(f"{load.num_tokens} tokens of {num_requests} requests: {load.errors}")
    return load


def _streams(port: int, workload: Workload, concurrency: int) -> Streams:
    load = _load(port, workload, concurrency, max(3, 2 * concurrency))
    gaps = sorted(load.between_tokens_s)
    return Streams(
        concurrency=concurrency,
        output_tokens_per_s=load.output_tokens_per_s,
        first_token_ms=statistics.median(load.first_token_s) * 1e3,
        between_tokens_ms=statistics.median(gaps) * 1e3,
        between_tokens_p99_ms=gaps[int(0.99 * (len(gaps) - 1))] * 1e3,
    )
