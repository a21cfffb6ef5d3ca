"""`--only curves`: what things cost as work grows, each along one axis, and whether that is right.

    running requests   1 … 1,024      the engine core's own step, admission, the whole engine's step
    context            128 … 32k      a decode step and a chunk of a prefill of a real model
    cached blocks      1k … 1M        a prompt that is new, one that is known
    output tokens      1k … 50k       a step of one request, its text, its stream over HTTP
    ranks              1 … 64         choice of a rank, reports of load, everything at once

Times of parts are of the thread's own processor time, so that a crowd on the machine counts little.
"""

import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from api import detokenizer
from api.load_balancer import LoadBalancer
from api.tokenizer import Tokenizer
from cluster.bench import machine
from cluster.bench.instant_workers import (
    BLOCK_SIZE,
    InstantWorkers,
    engine_config,
    make_request,
)
from cluster.bench.offline_run import Prompts
from cluster.bench.schedule import admission_us, decode_us
from cluster.coordinator import Coordinator
from engine.core import EngineCore
from engine.wire import EngineCoreOutputs, SchedulerStats
from tests.bench.bench_route import BLOCK_SIZE as ROUTE_BLOCK
from tests.bench.bench_route import CACHE_TOKENS, make_prompt
from tests.bench.bench_route import measure as measure_routes
from tests.bench.data_parallel import ScaleResult, Shape, measure_scale
from tests.bench.engines import Engine
from tests.bench.figures import Axis, Curve
from tests.bench.long_stream import gaps_us
from tests.bench.obedient import Obedient
from tests.helpers.scripted_models import make_scripted_model, make_slow_model

_RUNNING = [1, 4, 16, 64, 256, 1024]
_CONTEXTS = [128, 512, 2048, 8192, 32_000]
_BLOCKS = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
_OUTPUTS = [1000, 3000, 6000, 12_000, 25_000, 50_000]
_RANKS = [1, 2, 4, 8, 16, 32, 64]
_PROCESS_RANKS = [1, 4, 16, 64]

_ROUNDS = 100
_PROMPT_BLOCKS = 64
_NUM_PROMPTS = 40
_NUM_ROUTES = 100
_STEP_PROMPT = 16
_STEP_OUTPUT = 50
_RANK_STEP_S = 0.25
"""A step of a scripted rank: slow, so that two cores carry 64 of them."""
_RANK_STREAMS = 4
_RANK_WINDOW_S = 6.0
_CHILD_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class CurveSettings:
    folder: Path
    """Of a real model."""
    logs: Path
    max_ranks: int


def measure_curves(
    ours: Engine, settings: CurveSettings, say: Callable[[str], None]
) -> dict[str, Axis]:
    """All axes."""
    measures: dict[str, Callable[[], Axis]] = {
        "running": lambda: _running(ours, settings),
        "context": lambda: _context(ours, settings),
        "blocks": _blocks,
        "output": lambda: _output(ours, settings),
        "ranks": _ranks,
        "processes": lambda: _processes(ours, settings, say),
    }
    axes = {}
    for name, measure in measures.items():
        say(f"curve: {name}")
        with machine.watch() as load:
            axis = measure()
        axes[name] = replace(axis, others=round(load.others, 4))
    return axes


# ------------------------------------------------------------------------------ running requests


def _running(ours: Engine, settings: CurveSettings) -> Axis:
    return Axis(
        "running requests",
        _RUNNING,
        [
            Curve("schedule, update, encode, µs a step", _step_us(_RUNNING)),
            Curve("admission of all at once, µs", _medians(admission_us(n) for n in _RUNNING)),
            Curve("whole engine, scripted model, ms a step", _whole_steps_ms(ours, settings)),
        ],
    )


def _step_us(counts: Sequence[int]) -> list[float]:
    return _medians(decode_us(count, _ROUNDS)["step"] for count in counts)


def _whole_steps_ms(ours: Engine, settings: CurveSettings) -> list[float]:
    model = make_scripted_model(settings.logs, kind="cycle", token_ids=list(b"abc"))
    options = {"log_level": "WARNING", "max_num_seqs": max(_RUNNING), "max_model_len": 256}
    options |= {"max_num_batched_tokens": 1 << 15}
    arguments = {"engine": "raywire", "model": str(model), "options": options}
    with ours.commands("llm_commands.py", arguments, settings.logs, "-running") as child:
        _step_ms(child, model, max(_RUNNING), seed=0)
        return _medians(
            [_step_ms(child, model, count, seed=seed) for seed in (1, 2, 3)] for count in _RUNNING
        )


def _step_ms(child: Obedient, model: Path, count: int, seed: int) -> float:
    """Milliseconds of a decode step of so many requests, of an engine that is up."""
    prompts = [
        item["prompt_token_ids"]
        for item in Prompts(str(model), _STEP_PROMPT, seed=seed).take(count)
    ]
    one_s, all_s = (
        child.ask("generate", prompts=prompts, num_tokens=length, sampling={"temperature": 0.0})[
            "took_s"
        ]
        for length in (1, _STEP_OUTPUT)
    )
    return float(all_s - one_s) / (_STEP_OUTPUT - 1) * 1e3


# -------------------------------------------------------------------------------------- context


def _context(ours: Engine, settings: CurveSettings) -> Axis:
    words = [ours.python, "-m", "tests.bench.context_steps", "--model", str(settings.folder)]
    words += ["--contexts", ",".join(map(str, _CONTEXTS))]
    with (settings.logs / "context.log").open("wb") as log:
        child = subprocess.run(
            words,
            env=dict(ours.environ),
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=_CHILD_TIMEOUT_S,
            check=True,
        )
    found = json.loads(child.stdout)
    core_us = _medians(decode_us(1, _ROUNDS, context)["step"] for context in _CONTEXTS)
    return Axis(
        "tokens of context",
        _CONTEXTS,
        [
            Curve("decode step of the model, batch 1, ms", found["decode_ms"]),
            Curve(f"prefill of {found['chunk']} tokens behind it, ms", found["prefill_ms"]),
            Curve("schedule, update, encode, 1 running, µs a step", core_us, allowed=0.0),
        ],
    )


# ---------------------------------------------------------------------------------- prefix cache


def _blocks() -> Axis:
    found = [_cache_us(count) for count in _BLOCKS]
    what = f"a prompt of {_PROMPT_BLOCKS * BLOCK_SIZE:,} tokens"
    return Axis(
        "blocks in the prefix cache, all taken",
        _BLOCKS,
        [
            Curve(f"schedule {what} that is new, µs", [new for new, _ in found], allowed=0.0),
            Curve(f"schedule {what} that is known, µs", [old for _, old in found], allowed=0.0),
        ],
    )


def _cache_us(num_blocks: int) -> tuple[float, float]:
    """Microseconds of one step with one request, whose prompt is new, and known."""
    workers = InstantWorkers(kv_tokens=num_blocks * BLOCK_SIZE)
    core = EngineCore(engine_config(), workers)
    noise = np.random.default_rng(0)

    def run(name: str, prompt: np.ndarray) -> float:
        core.add(core.prepare(make_request(name, prompt, max_tokens=1)))
        began = time.thread_time_ns()
        while core.has_work():
            core.step(lambda: None)
        return (time.thread_time_ns() - began) / 1e3

    def prompt(blocks: int) -> np.ndarray:
        return noise.integers(0, 900, blocks * BLOCK_SIZE, dtype=np.uint32)

    # Whatever the cache holds was computed once: prompts as long as a step may have tokens.
    fill = min(num_blocks // 2, 4096)
    for number in range(2 * num_blocks // fill):
        run(f"fill-{number}", prompt(fill))
    prompts = [prompt(_PROMPT_BLOCKS) for _ in range(min(_NUM_PROMPTS, num_blocks // 128))]
    new, known = (
        [run(f"{kind}-{number}", each) for number, each in enumerate(prompts)]
        for kind in ("new", "known")
    )
    return statistics.median(new), statistics.median(known)


# -------------------------------------------------------------------------------- output tokens


def _output(ours: Engine, settings: CurveSettings) -> Axis:
    model = make_scripted_model(settings.logs, kind="cycle", token_ids=list(b"abc"))
    streamed = gaps_us(ours, _long(model), max(_OUTPUTS), settings.logs)
    return Axis(
        "output tokens so far",
        _OUTPUTS,
        [
            Curve("schedule, update, encode, µs a step", _at(_long_run_us()), allowed=0.0),
            Curve("text of a token, µs", _at(_text_us(settings.folder)), allowed=0.0),
            Curve("streamed over HTTP, scripted model, µs a token", _at(streamed), allowed=0.0),
        ],
    )


def _long(model: Path) -> Path:
    """The same model with room for a long answer."""
    file = model / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 2 * max(_OUTPUTS)
    longer = model.with_name(f"{model.name}-long")
    longer.mkdir(exist_ok=True)
    for other in model.iterdir():
        (longer / other.name).write_bytes(other.read_bytes())
    (longer / file.name).write_text(json.dumps(config), encoding="utf-8")
    return longer


def _at(per_token_us: Sequence[float]) -> list[float]:
    """The median of the last 500 tokens before each place."""
    return [statistics.median(per_token_us[place - 500 : place]) for place in _OUTPUTS]


def _long_run_us() -> list[float]:
    return decode_us(1, max(_OUTPUTS))["step"]


def _text_us(folder: Path) -> list[float]:
    tokenizer = Tokenizer.load(folder)
    noise = random.Random(0)
    stream = detokenizer.start(tokenizer)
    took = []
    for _ in range(max(_OUTPUTS)):
        token_ids = [noise.randrange(1000, 20_000)]
        began = time.perf_counter_ns()
        stream.push(token_ids)
        took.append((time.perf_counter_ns() - began) / 1e3)
    return took


# ---------------------------------------------------------------------------------------- ranks


def _ranks() -> Axis:
    return Axis(
        "ranks",
        _RANKS,
        [
            Curve("choice of a rank, 1,000 new tokens, µs", [_route_us(n) for n in _RANKS]),
            Curve("coordinator: loads of all ranks and a report, µs", _medians(_report_us())),
        ],
    )


def _route_us(num_ranks: int) -> float:
    noise = np.random.default_rng(0)
    balancer = LoadBalancer(num_ranks)
    for rank in range(num_ranks):
        balancer.mark_up(rank, ROUTE_BLOCK, CACHE_TOKENS)
    for _ in range(500):
        balancer.finish(balancer.choose(make_prompt(noise, 1000)).rank)
    return measure_routes(balancer, [make_prompt(noise, 1000) for _ in range(_NUM_ROUTES)])


def _report_us() -> Iterator[list[float]]:
    for num_ranks in _RANKS:
        coordinator = Coordinator(num_ranks)
        for rank in range(num_ranks):
            coordinator.take_ready(rank, 0)
        took = []
        for number in range(_ROUNDS):
            began = time.thread_time_ns()
            for rank in range(num_ranks):
                stats = SchedulerStats(number, number % 7, 0.5)
                coordinator.take_outputs(EngineCoreOutputs(rank, 0, [], stats, 1.0))
            assert coordinator.take_report(10.0 * number) is not None
            took.append((time.thread_time_ns() - began) / 1e3)
        yield took


def _processes(ours: Engine, settings: CurveSettings, say: Callable[[str], None]) -> Axis:
    """Real processes, two a rank: API server, engine cores, workers that wait, coordinator."""
    model = make_slow_model(settings.logs, step_delay_s=_RANK_STEP_S)
    ranks = [count for count in _PROCESS_RANKS if count <= settings.max_ranks]
    results: list[ScaleResult] = []
    for count in ranks:
        shape = Shape(count, 1, _RANK_STREAMS, _RANK_WINDOW_S)
        log = settings.logs / f"ranks-{count}.log"
        try:
            results.append(measure_scale(model, shape, ours.environ, log, say))
        except (RuntimeError, TimeoutError) as error:
            say(f"{count} ranks are too many for this machine: {error}")
            break
    front = [
        sum(each.cpu_s_per_1000_tokens(role) for role in ("API server", "coordinator")) * 1e3
        for each in results
    ]
    ranks_cpu = [
        sum(each.cpu_s_per_1000_tokens(role) for role in ("engine core", "worker")) * 1e3
        for each in results
    ]
    per_stream = [
        each.load.tokens_per_s / each.shape.ranks / each.shape.streams_per_rank for each in results
    ]
    return Axis(
        "ranks, as processes, behind one API server",
        [each.shape.ranks for each in results],
        [
            Curve("start to /ready, s", [each.ready_s for each in results]),
            Curve("API server and coordinator, CPU ms for 1,000 tokens", front, allowed=0.0),
            Curve("engine cores and workers, CPU ms for 1,000 tokens", ranks_cpu, allowed=0.0),
            Curve("tokens a second of a stream", per_stream, allowed=0.0),
        ],
    )


def _medians(samples: "Iterator[list[float]] | Sequence[list[float]]") -> list[float]:
    return [statistics.median(each) for each in samples]
