"""`python -m tests.bench --only dp`: what it costs to be many processes behind one endpoint.

Everything runs on the scripted model, which computes nothing: ranks at 20 ms a step under load,
then, without a delay, one request at a time, the wires by themselves, and the choice of a rank.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.bench import server_process
from cluster.bench.wire import measure_trips
from tests.bench import bench_route
from tests.bench.data_parallel import measure_scale, shapes
from tests.bench.ray_start import measure_ray_start
from tests.bench.scale_report import FirstTokens, RouteCost, ScaleFigures
from tests.helpers.scripted_models import make_scripted_model, make_slow_model

STEP_S = 0.02
_ROUTE_PROMPTS = (1000, 8000, 100_000)
_FIRST_TOKEN_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    ranks: Sequence[int]
    streams_per_rank: int
    window_s: float
    rounds: int
    """Of single requests and messages."""
    with_ray: bool
    environ: Mapping[str, str]
    logs: Path
    """Models are made there, too."""


def measure_all(settings: ScaleSettings, say: Callable[[str], None]) -> ScaleFigures:
    """Start with what wants the machine for itself most."""
    slow = make_slow_model(settings.logs, step_delay_s=STEP_S)
    quick = make_scripted_model(settings.logs, kind="cycle", token_ids=list(b"abc"))
    first_tokens = _first_tokens(quick, settings, say)
    say("the wires")
    trips = measure_trips(settings.rounds)
    say("the choice of a rank")
    routes = _routes()
    scale = [
        measure_scale(slow, shape, settings.environ, _log(settings, f"dp-{number}"), say)
        for number, shape in enumerate(
            shapes(settings.ranks, settings.streams_per_rank, settings.window_s)
        )
    ]
    ray = None
    if settings.with_ray:
        ray = measure_ray_start(slow, settings.environ, _log(settings, "ray"), say)
    return ScaleFigures(scale, first_tokens, trips, routes, ray)


def _first_tokens(model: Path, settings: ScaleSettings, say: Callable[[str], None]) -> FirstTokens:
    say("the first token")
    port, out = server_process.free_port(), settings.logs / "first-token.json"
    server = server_process.raywire_command(str(model), port, ["--served-model-name", "bench"])
    client = [sys.executable, "-m", "tests.bench.first_token", "--model", str(model)]
    client += ["--port", str(port), "--out", str(out), "--rounds", str(settings.rounds)]
    # It has threads and sockets of its own when it starts the second engine.
    environ = {**settings.environ, "RAYWIRE_WORKER_MULTIPROC_METHOD": "spawn"}
    log = _log(settings, "first-token")
    with (
        server_process.started(server, settings.environ, port, log, "/ready"),
        log.open("ab") as output,
    ):
        subprocess.run(
            client,
            env=environ,
            stdout=output,
            stderr=output,
            timeout=_FIRST_TOKEN_TIMEOUT_S,
            check=True,
        )
    return FirstTokens(**json.loads(out.read_text(encoding="utf-8")))


def _routes() -> list[RouteCost]:
    random = np.random.default_rng(0)
    balancer = bench_route.make_balancer(random)
    costs = []
    for num_tokens in _ROUTE_PROMPTS:
        prompts = [
            bench_route.make_prompt(random, num_tokens) for _ in range(bench_route.NUM_PROMPTS)
        ]
        new_us, known_us = (bench_route.measure(balancer, prompts) for _ in range(2))
        costs.append(RouteCost(num_tokens, new_us, known_us))
    return costs


def _log(settings: ScaleSettings, name: str) -> Path:
    return settings.logs / f"{name}.log"
