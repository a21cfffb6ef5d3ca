"""`raywire bench startup`: a server as users start it, from the command to its end."""

import os
import re
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from cluster.bench import server_process
from cluster.bench.http_load import Endpoint, run_load
from cluster.bench.machine import Tree, watch
from cluster.bench.results import Measured, Results
from cluster.bench.serve import completion_body
from cluster.bench.workload import Item
from cluster.environment import SECRETS
from engine.errors import ConfigError

_NAME = "bench"
_SETTLE_S = 2.0
"""What spins for a moment after work may come to rest."""
_IDLE_S = 5.0
_STOP_TIMEOUT_S = 60.0
_STAGE = re.compile(r"(\w+)=([\d.]+)s")


def measure_startup(
    model: str, serve_flags: Sequence[str], num_warmups: int, repeats: int
) -> Results:
    """Start the server, ask it for one token, leave it alone, stop it; and again. The first
    `num_warmups` starts do not count.

    Raises:
        ConfigError: the server does not come up, or refuses the request; its log remains.
    """
    figures: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    logs = Path(tempfile.mkdtemp(prefix="raywire-bench-"))
    with watch() as load:
        for number in range(num_warmups + repeats):
            try:
                found = _start(model, serve_flags, logs / f"server-{number}.log")
            except RuntimeError as error:
                raise ConfigError(str(error)) from error
            for name, value in found.items() if number >= num_warmups else ():
                figures[name].append([value])
    shutil.rmtree(logs)
    return Results(
        "startup",
        {
            "model": model,
            "flags": list(serve_flags),
            "num_warmups": num_warmups,
            "repeats": repeats,
        },
        [Measured(name, unit, values) for (name, unit), values in figures.items()],
        load,
        notes=["stages are the server's own account; PSS shares out what processes share"],
    )


def _start(model: str, flags: Sequence[str], log: Path) -> dict[tuple[str, str], float]:
    """Figures of one start, by name and unit."""
    port = server_process.free_port()
    command = server_process.raywire_command(model, port, [*flags, "--served-model-name", _NAME])
    began = time.monotonic()
    # A key of the user's is for other servers.
    environ = {name: value for name, value in os.environ.items() if name not in SECRETS}
    with server_process.started(command, environ, port, log, "/ready") as (process, ready_s):
        body = completion_body(_NAME, Item([65, 66, 67], 1))
        (answer,) = run_load(Endpoint("127.0.0.1", port, "/v1/completions"), [body]).answers
        if answer.error is not None:
            raise RuntimeError(f"no first token: {answer.error}; see {log}")
        first_token_s = time.monotonic() - began
        tree = Tree(process.pid)
        time.sleep(_SETTLE_S)
        cpu_before = tree.cpu_s()
        time.sleep(_IDLE_S)
        idle_cores = (tree.cpu_s() - cpu_before) / _IDLE_S
        memory = tree.memory()
        stopped = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)
        stop_s = time.monotonic() - stopped
    stages = _STAGE.findall(server_process.waterfall(log))
    return {
        ("to ready", "s"): ready_s,
        **{(f"  {name}", "s"): float(seconds) for name, seconds in stages if name != "total"},
        ("to the first token", "s"): first_token_s,
        ("memory (PSS)", "MiB"): sum(part.pss_mib for part in memory),
        **{(f"  {part.title}", "MiB"): part.pss_mib for part in memory},
        ("idle", "cores"): idle_cores,
        ("SIGTERM to the end", "s"): stop_s,
    }
