"""`raywire drain`: asks the server on a port of this machine to end, and waits until it has.

For hooks that run beside a server and know no process id, like Kubernetes' preStop. It finds the
API servers that listen on the port, and asks whoever answers for them: the command, which is the
only API server itself or the parent of several. Only processes of the same user are looked at.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TITLE = b"RAYWIRE::APIServer_"
_PROC = Path("/proc")
_LISTEN = "0A"
"""State of a socket, in the kernel's tables."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """The process that answers for a server."""

    pid: int
    descriptor: int
    """A pidfd: the number may be another process's by the time that we signal."""


def find(port: int) -> list[ServerProcess]:
    """Our servers on that port; `drain` closes the descriptors."""
    sockets = _listening(port)
    pids = {_who_answers(pid) for pid in _api_servers() if sockets & _sockets(pid)}
    found = []
    for pid in sorted(pids):
        with contextlib.suppress(ProcessLookupError):
            found.append(ServerProcess(pid, os.pidfd_open(pid)))
    return found


def drain(servers: list[ServerProcess], timeout_s: float) -> list[int]:
    """Ask all to end; wait until they have. Returns the pids of those that have not in time."""
    deadline = time.monotonic() + timeout_s
    running = {server.descriptor: server.pid for server in servers}
    for descriptor in running:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    poller = select.poll()
    for descriptor in running:
        poller.register(descriptor, select.POLLIN)
    while running and (left_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left_s * 1000):
            poller.unregister(descriptor)
            del running[descriptor]
    for server in servers:
        os.close(server.descriptor)
    return sorted(running.values())


def _api_servers() -> Iterator[int]:
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and _is_ours(entry) and _title(entry).startswith(_TITLE):
            yield int(entry.name)


def _who_answers(pid: int) -> int:
    """The command, where that has API servers as children; else the API server, which is it."""
    parent = _parent(pid)
    words = _title(_PROC / str(parent)).replace(b"\0", b" ").split()
    is_command = b"serve" in words and any(
        b"raywire" in word or word == b"cluster" for word in words
    )
    # A shell that runs the command has the same words, and would end without it.
    return parent if is_command and _program(parent) == _program(pid) else pid


def _program(pid: int) -> str | None:
    """What a process runs; None where that is not ours to know."""
    with contextlib.suppress(OSError):
        return os.readlink(_PROC / str(pid) / "exe")
    return None


def _is_ours(entry: Path) -> bool:
    with contextlib.suppress(OSError):
        return entry.stat().st_uid == os.getuid()
    return False


def _title(entry: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (entry / "cmdline").read_bytes()
    return b""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        # Behind the name in parentheses, which may hold anything: state, parent.
        return int((_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


def _listening(port: int) -> set[str]:
    """The sockets that listen there, as /proc/PID/fd shows them."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{rest[5]}]")
    return found


def _sockets(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(entry.readlink()))
    return found
