"""ENTRY, keeper: ends what is left of a Ray cluster of our own, however the command has died.

    command --starts--> Ray's node manager --starts--> its agents, its workers
       |                     dies with the command     stay: nobody tells them
       '-----leash-----> keeper: then kills them, and removes the cluster's folder

The agents' titles do not say whose they are, but the files that they have open do: each cluster of
our own has a folder of its own for logs and sockets. The keeper leads a process group, since a
SIGKILL may be for all of the command's, as with a shell's `kill -9 %1`. Used by `ray_session`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine import leash
from engine.lifecycle import leave_stopping_to_parent

_END_S = 10.0
"""How long Ray may go on to start processes while they are killed."""

_POLL_S = 0.05


class RayKeeper:
    """The command's end. Nothing remains of `folder` and its processes once this is closed, or this
    process is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = leash.start_module(__name__, leads_group=True)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """End what is there and wait for it. Idempotent."""
        self._let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def leave(self) -> None:
        """End what is there. The folder stays: its logs say why the cluster has not started."""
        self._process.kill()
        self._process.wait()
        self._let_go()
        end_all(self.folder, spared={os.getpid()})

    def _let_go(self) -> None:
        """Of its leash, and of what it might say."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    leave_stopping_to_parent()
    command = os.getppid()
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        return  # the command died before it could say which; "" would be the working directory
    folder = Path(line.rstrip("\n"))
    sys.stdin.read()  # until the leash is let go, or nobody is there to hold it
    end_all(folder, spared={command, os.getpid()})
    shutil.rmtree(folder, ignore_errors=True)


def end_all(folder: Path, spared: set[int]) -> None:
    """Kill every process that has a file below `folder` open, but those, until there is none."""
    folder = folder.resolve()  # as the kernel tells of open files
    give_up_at = time.monotonic() + _END_S
    while time.monotonic() < give_up_at:
        users = [pid for pid in _pids() if pid not in spared and _kill_if_user(pid, folder)]
        if not users:
            return
        time.sleep(_POLL_S)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _kill_if_user(pid: int, folder: Path) -> bool:
    """Kill a process that has a file below `folder` open. Returns whether it had."""
    try:
        descriptor = os.pidfd_open(pid)  # before a look: the number may be another's afterwards
    except OSError:
        return False
    try:
        is_user = _has_open(pid, folder)
        if is_user:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return is_user
    except OSError:  # another user's, or gone by now
        return False
    finally:
        os.close(descriptor)


def _has_open(pid: int, folder: Path) -> bool:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(f"{folder}/"):
                return True
    return False


if __name__ == "__main__":
    main()
