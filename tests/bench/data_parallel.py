"""What N ranks behind one endpoint give, compared with N times what one gives.

The scripted model at a fixed time per step: its ranks wait instead of computing, so that what is
lost is lost between the processes, and a small machine can run many of them. Where efficiency falls
because the cores are used up, the figures beside it say so: cores used, the time that engine cores
and workers were ready to run and had to wait for one, and CPU seconds per 1,000 tokens by role,
which hardly depend on how many cores there are.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.bench import machine, server_process
from cluster.bench.machine import Tree, Usage
from tests.bench.steady_load import SteadyLoad, run_steady_load

WARM_UP_S = 1.5
ROLES = ("API server", "engine core", "worker", "coordinator", "client", "other")
_ROLES_BY_TITLE = {
    "RAYWIRE::APIServer": "API server",
    "RAYWIRE::EngineCore": "engine core",
    "RAYWIRE::Worker": "worker",
    "RAYWIRE::DPCoordinator": "coordinator",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What is started, and the load."""

    ranks: int
    api_servers: int
    streams_per_rank: int
    window_s: float


@dataclass(slots=True)
class ScaleResult:
    """One server under its load."""

    shape: Shape
    ready_s: float
    """From starting the command to 200 on /ready."""
    waterfall: str
    """Where that time went, in the server's words."""
    load: SteadyLoad
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By role, in the window."""
    wait_share: float = 0.0
    """Share of the window that an engine core and its worker were ready to run, without a core."""
    others_share: float = 0.0
    """Share of the cores that went to everybody else."""

    @property
    def cores_used(self) -> float:
        return sum(self.cpu_s.values()) / self.load.wall_s

    def cpu_s_per_1000_tokens(self, role: str) -> float:
        return self.cpu_s.get(role, 0.0) / self.load.num_tokens * 1000


def shapes(ranks: Sequence[int], streams_per_rank: int, window_s: float) -> list[Shape]:
    """Each number of ranks behind one API server, and behind as many as ranks, the default."""
    return [
        Shape(n, api_servers, streams_per_rank, window_s)
        for n in ranks
        for api_servers in sorted({1, n})
    ]


def measure_scale(
    model: Path, shape: Shape, environ: Mapping[str, str], log: Path, say: Callable[[str], None]
) -> ScaleResult:
    """Start a server of that shape, put it under its load, and stop it."""
    say(f"{shape.ranks} ranks, {shape.api_servers} API servers")
    port = server_process.free_port()
    flags = ["-dp", str(shape.ranks), "--data-parallel-backend", "mp"]
    flags += ["--api-server-count", str(shape.api_servers), "--served-model-name", "bench"]
    command = server_process.raywire_command(str(model), port, flags)
    with server_process.started(command, environ, port, log, "/ready") as (process, ready_s):
        meter = Meter(process.pid)
        load = run_steady_load(
            port,
            model="bench",
            num_streams=shape.ranks * shape.streams_per_rank,
            warm_up_s=WARM_UP_S,
            window_s=shape.window_s,
            on_edge=meter.read,
        )
        result = ScaleResult(shape, ready_s, server_process.waterfall(log), load)
        meter.report(result)
    return result


class Meter:
    """What the processes below `pid`, and this one, which is the client, get of the cores between
    two readings."""

    def __init__(self, pid: int) -> None:
        self._tree = Tree(pid)
        self._client = os.getpid()
        self._readings: list[tuple[float, dict[int, Usage]]] = []

    def read(self) -> None:
        usages = self._tree.usages() | {self._client: machine.usage(self._client)}
        self._readings.append((machine.busy_s(), usages))

    def report(self, result: ScaleResult) -> None:
        """Fill in what the processors did in the window."""
        (busy_before, before), (busy_after, after) = self._readings
        cpu_s: dict[str, float] = defaultdict(float)
        wait_s: dict[str, float] = defaultdict(float)
        for pid in before.keys() & after.keys():
            role = "client" if pid == self._client else _role(after[pid].title)
            cpu_s[role] += after[pid].cpu_s - before[pid].cpu_s
            wait_s[role] += after[pid].wait_s - before[pid].wait_s
        result.cpu_s = dict(cpu_s)
        window_s = result.load.wall_s
        waited_s = wait_s["engine core"] + wait_s["worker"]
        result.wait_share = waited_s / result.shape.ranks / window_s
        others_s = busy_after - busy_before - sum(cpu_s.values())
        result.others_share = max(0.0, others_s) / window_s / (os.cpu_count() or 1)


def _role(title: str) -> str:
    """`RAYWIRE::Worker_DP0_PP0_TP0` is a worker. What remains is the command itself, where it only
    supervises, and Python's resource tracker."""
    return _ROLES_BY_TITLE.get(title.partition("_")[0], "other")
