"""A server as users start it: time until it answers, memory, idle load, streams, time to stop."""

import contextlib
import http.client
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench.http_load import Workload, run_load
from tests.bench.machine import ProcessMemory, Tree

START_TIMEOUT_S = 900.0
IDLE_S = 5.0


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


def raywire_command(model: str, port: int, limits: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "cluster", "serve", model, "--port", str(port), *limits]


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
    with started(command, environ, port, log) as (process, ready_s):
        result.ready_s = ready_s
        run_load(port, workload, 1, 1)
        tree = Tree(psutil.Process(process.pid))
        time.sleep(2.0)  # what spins for a moment after work may come to rest
        cpu_before = tree.cpu_s()
        time.sleep(IDLE_S)
        result.idle_cores = (tree.cpu_s() - cpu_before) / IDLE_S
        for concurrency in concurrencies:
            run_load(port, workload, concurrency, concurrency)
            result.streams.append(_streams(port, workload, concurrency))
        result.memory = tree.memory()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        result.stop_s = time.monotonic() - began
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def waterfall(log: Path) -> str:
    """Where the time of the last start went, as the server's log says it; empty for another's."""
    found = re.findall(r"ready (total=.*)", log.read_text(encoding="utf-8", errors="replace"))
    return found[-1].strip() if found else ""


def _streams(port: int, workload: Workload, concurrency: int) -> Streams:
    load = run_load(port, workload, concurrency, max(3, 2 * concurrency))
    gaps = sorted(load.between_tokens_s)
    return Streams(
        concurrency=concurrency,
        output_tokens_per_s=load.output_tokens_per_s,
        first_token_ms=statistics.median(load.first_token_s) * 1e3,
        between_tokens_ms=statistics.median(gaps) * 1e3,
        between_tokens_p99_ms=gaps[int(0.99 * (len(gaps) - 1))] * 1e3,
    )


@contextmanager
def started(
    command: Sequence[str], environ: Mapping[str, str], port: int, log: Path, probe: str = "/health"
) -> Iterator[tuple["subprocess.Popen[bytes]", float]]:
    """Run a server for as long as the block. Yields it, and the seconds from starting the command
    to 200 on `probe`."""
    # In our own session: with automatic groups, the kernel shares the cores among sessions first,
    # and a client in another one than its server is served in lumps.
    began = time.monotonic()
    with (
        log.open("ab") as output,
        subprocess.Popen(command, env=environ, stdout=output, stderr=output) as process,
    ):
        try:
            wait_up(process, port, log, probe)
            yield process, time.monotonic() - began
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()


def wait_up(process: "subprocess.Popen[bytes]", port: int, log: Path, probe: str) -> None:
    """Wait for 200 on `probe`; RuntimeError if the process ends before that."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", probe)
                if connection.getresponse().status == 200:
                    return
            finally:
                connection.close()
        time.sleep(0.05)
    raise RuntimeError(f"no 200 on {probe} within {START_TIMEOUT_S:.0f} s; see {log}")
