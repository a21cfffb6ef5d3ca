"""How an actor on the command's node notices that the command is gone. Used by `actors`.

Ray ends a command's actors, unless its own process on the node dies with the command, as that of a
cluster of our own does. Actors then wait for that process to vanish, which takes for ever where
process 1 of the container does not reap. A process descriptor (pidfd) tells at once.
"""

import logging
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this machine, apart from any other that ever had its pid."""

    pid: int
    started: str
    """As the kernel counts, since it was booted."""


def identify(pid: int) -> ProcessIdentity | None:
    """The process that has this pid; None if there is none, or if it cannot be told apart."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessIdentity(pid, fields[19])


def end_with(process: ProcessIdentity) -> None:
    """Kill this process when that one ends; workers follow. Nothing happens if it is not found: in
    a PID namespace of its own an actor cannot see the command."""
    if sys.platform != "linux" or identify(process.pid) != process:
        return
    descriptor = os.pidfd_open(process.pid)
    if identify(process.pid) != process:  # it ended just before, and the pid is another's
        os.close(descriptor)
        return
    threading.Thread(
        target=_watch, args=(descriptor, process.pid), name="command-watch", daemon=True
    ).start()


def _watch(descriptor: int, pid: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll()
    logger.error("the command, pid=%d, is gone; ending with it", pid)
    os.kill(os.getpid(), signal.SIGKILL)
