"""From submitting a server as a Ray job to /ready, on a cluster of this machine.

The cluster is that of `make demo-cluster`, so there are two ranks. Starting Ray is measured by
itself: whoever has a cluster has done that long ago.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.bench import server_process
from cluster.demo_keeper import NUM_RANKS

_SUBMITTED = re.compile(r"submitted successfully")
_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RayStart:
    ray_s: float
    """From nothing to a cluster that has taken the job."""
    ready_s: float
    """From there to 200 on /ready."""
    waterfall: str
    num_ranks: int = NUM_RANKS


def measure_ray_start(
    model: Path, environ: Mapping[str, str], log: Path, say: Callable[[str], None]
) -> RayStart:
    """Start Ray, submit a server to it, and end both."""
    say("Ray: from submit to ready")
    port = server_process.free_port()
    # Short: Ray puts sockets below it. The keeper removes it.
    folder = tempfile.mkdtemp(prefix="rw-")
    command = [sys.executable, "-m", "cluster.demo_keeper", folder, str(model), str(port)]
    began = time.monotonic()
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as keeper,
    ):
        try:
            _wait_submitted(keeper, log)
            submitted = time.monotonic()
            server_process.wait_up(keeper, port, log, "/ready")
            ready_s = time.monotonic() - submitted
        finally:
            keeper.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(_STOP_TIMEOUT_S)
            keeper.kill()
    return RayStart(submitted - began, ready_s, server_process.waterfall(log))


def _wait_submitted(keeper: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not _SUBMITTED.search(log.read_text(errors="replace")):
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job has not been submitted; see {log}")
        time.sleep(0.05)
