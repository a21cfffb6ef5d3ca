"""Kills, hangs and pauses processes of this server: what `POST /chaos` does, and the soak test.

Only processes that descend from the server's own command are touched, and only those that bear a
title of ours. Which of several it is, the caller decides by a number: a run can be repeated.
"""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Action = Literal["kill", "hang", "pause"]
"""SIGKILL; SIGSTOP for good, which somebody has to notice; SIGSTOP for `PAUSE_S`, which nobody
should mind."""

Role = Literal["rank", "worker", "api-server", "coordinator"]

PAUSE_S = 3.0
"""Less than the silence after which anything counts as hung."""

_TITLES: dict[Role, str] = {
    "rank": "EngineCore_",
    "worker": "Worker_",
    "api-server": "APIServer_",
    "coordinator": "DPCoordinator",
}

_PREFIX = "RAYWIRE::"


@dataclass(frozen=True, slots=True)
class Kind:
    """What is done to which sort of process. As text: `kill-rank`."""

    action: Action
    role: Role

    @classmethod
    def parse(cls, text: str) -> "Kind":
        """Raises ValueError with the names there are."""
        for kind in KINDS:
            if str(kind) == text:
                return kind
        raise ValueError(f"{text[:40]!r} is none of {', '.join(map(str, KINDS))}")

    def __str__(self) -> str:
        return f"{self.action}-{self.role}"


KINDS = tuple(
    Kind(action, role)
    for role in get_args(Role)
    for action in get_args(Action)
    # API servers do without a coordinator for a while, so nobody takes a silent one for dead.
    if (action, role) != ("hang", "coordinator")
)


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A living process of a server."""

    title: str
    """Without the prefix: `EngineCore_DP0`."""
    pid: int

    @property
    def role(self) -> Role | None:
        for role, begin in _TITLES.items():
            if self.title.startswith(begin):
                return role
        return None


def processes_below(root_pid: int) -> list[Process]:
    """All processes with a title of ours among one process and its descendants, by title."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
            parents[int(folder.name)] = parent
    family, size = {root_pid}, 0
    while len(family) > size:
        size = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return sorted(Process(title, pid) for pid in family if (title := _title(pid)) is not None)


def choose(processes: list[Process], role: Role, draw: float) -> Process | None:
    """One of a role.

    Args:
        processes: sorted, so that the same draw means the same one.
        role: of what sort.
        draw: from 0 up to, not including, 1.
    """
    candidates = [process for process in processes if process.role == role]
    return candidates[int(draw * len(candidates))] if candidates else None


def strike(process: Process, action: Action, pause_s: float = PAUSE_S) -> None:
    """Do it. Returns at once; a pause ends by itself, whatever becomes of the caller meanwhile.

    Raises:
        ProcessLookupError: it is gone already.
    """
    match action:
        case "kill":
            os.kill(process.pid, signal.SIGKILL)
        case "hang":
            os.kill(process.pid, signal.SIGSTOP)
        case "pause":
            os.kill(process.pid, 0)
            threading.Thread(
                target=_pause, args=(process.pid, pause_s), name="pause", daemon=True
            ).start()


def _pause(pid: int, pause_s: float) -> None:
    """By a process of its own: the caller may be who pauses, and may be killed before it is over.
    In a session of its own, so that nobody ends it with the caller's group."""
    code = (
        "import os, signal, time;"
        f"os.kill({pid}, signal.SIGSTOP); time.sleep({pause_s}); os.kill({pid}, signal.SIGCONT)"
    )
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        check=False,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _parent(folder: Path) -> int | None:
    """The parent of a process that lives: zombies have nothing to lose."""
    try:
        state, parent, *_ = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state == b"Z" else int(parent)


def _title(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    name = text.strip("\0 ")
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None
