"""A server of any kind, as a process for as long as a measurement takes."""

import contextlib
import http.client
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 900.0


def raywire_command(model: str, port: int, limits: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "cluster", "serve", model, "--port", str(port), *limits]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def waterfall(log: Path) -> str:
    """Where the time of the last start went, as the server's log says it; empty for another's."""
    found = re.findall(r"ready (total=.*)", log.read_text(encoding="utf-8", errors="replace"))
    return found[-1].strip() if found else ""


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
