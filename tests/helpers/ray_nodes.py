"""A Ray cluster on this machine, without namespaces: nodes with loopback addresses of their own.

It has a session and a temporary folder of its own, so several may run beside each other, and what
is not part of it is left alone. For hosts that share nothing see `tests/integration/hosts.py`.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.server import Process, session_processes, wait_for

NUM_CPUS = 4
"""Of each node."""

_ADDRESS = re.compile(r"ray start --address='([^']+)'")
_STARTED = re.compile("runtime started")

_START_TIMEOUT_S = 120.0


@dataclass
class RayNodes:
    """A running cluster."""

    folder: Path
    environment: dict[str, str]
    """Of everybody who has to do with it."""
    address: str = ""
    commands: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def processes(self, title: str = "") -> list[Process]:
        """Living processes of the cluster whose title has this part."""
        return [
            process
            for command in self.commands
            for process in session_processes(command.pid)
            if title in process.title
        ]

    def actors(self) -> list[Process]:
        """Those of our server, and their workers."""
        return [p for p in self.processes() if re.match(r"ray::(Engine|DPC)|RAYWIRE::", p.title)]

    def reservations(self) -> list[dict[str, Any]]:
        """The placement groups that are not gone. Asking takes two seconds."""
        code = (
            "import json, sys, ray; ray.init(sys.argv[1]);"
            "print(json.dumps(list(ray.util.placement_group_table().values())))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, self.address],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return [row for row in json.loads(done.stdout) if row["state"] != "REMOVED"]


@contextlib.contextmanager
def ray_nodes(count: int = 1) -> Iterator[RayNodes]:
    """Start a cluster of so many nodes; end it with the block, and check that it is gone."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
        nodes = RayNodes(Path(folder), {**token, **quiet, "NO_COLOR": "1"})
        try:
            head = ["--head", "--port=0", f"--ray-client-server-port={_free_port()}"]
            head += ["--include-dashboard=false", f"--temp-dir={folder}"]
            nodes.address = _start(nodes, 0, head, _ADDRESS)[1]
            for index in range(1, count):
                # All nodes write to one folder here, of which one reader is enough.
                joining = [f"--address={nodes.address}", "--include-log-monitor=false"]
                _start(nodes, index, joining, _STARTED)
            yield nodes
        finally:
            _end(nodes)


def _start(
    nodes: RayNodes, index: int, flags: Sequence[str], words: "re.Pattern[str]"
) -> "re.Match[str]":
    """Start a node, which lives as long as its command, and wait until that has said so."""
    log = nodes.folder / f"start-{index}.log"
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--block",
        f"--node-ip-address=127.0.0.{index + 3}",  # Ray replaces 127.0.0.1
        f"--num-cpus={NUM_CPUS}",
        "--object-store-memory=80000000",
        "--dashboard-agent-listen-port=0",
        "--disable-usage-stats",
        *flags,
    ]
    with log.open("wb") as file:
        started = subprocess.Popen(
            command,
            env={**os.environ, **nodes.environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    nodes.commands.append(started)

    def find() -> "re.Match[str] | None":
        has_ended = started.poll() is not None
        found = words.search(log.read_text())
        assert found or not has_ended, f"`ray start` has ended:\n{log.read_text()}"
        return found

    match = wait_for(find, f"a node; see {log}", _START_TIMEOUT_S)
    assert match is not None
    return match


def _end(nodes: RayNodes) -> None:
    for command in reversed(nodes.commands):
        command.send_signal(signal.SIGTERM)
    try:
        wait_for(lambda: not nodes.processes(), "the cluster ends", 20)
    finally:
        for process in nodes.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for command in nodes.commands:
            command.wait(10)


def _free_port() -> int:
    """Ray insists on a number here, though nobody uses what listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
