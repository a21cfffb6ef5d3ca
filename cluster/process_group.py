"""Children that lead a process group of their own, so that they and all that they have started can
be ended as one: also what has lost its parent already, and what was stopped.

Used by `supervisor` for engine cores that may be replaced. In the default mode the server ends with
them, and their workers end by themselves when they do.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

_LOOK_S = 0.01


def lead_group() -> None:
    """Lead a group from now on. In a child, before it starts anything. A terminal's Ctrl-C does not
    reach it any more, which children ignore anyway."""
    os.setpgid(0, 0)


def end_group(leader_pid: int, timeout_s: float) -> list[int]:
    """Kill all members of the group that a child of ours leads or has led, and wait for their end.

    Returns:
        Those that survive it for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (members := group_members(leader_pid)) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader_pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return members


def group_members(leader_pid: int) -> list[int]:
    """The living members of a group. Only of our own session: once a group is empty, its number may
    be that of somebody else's."""
    session = os.getsid(0)
    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if _is_member(folder, leader_pid, session)
    ]


def _is_member(folder: Path, group: int, session: int) -> bool:
    try:
        # "pid (name) state parent group session …", and a name may hold anything.
        state, _, its_group, its_session, *_ = (
            (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        )
    except (OSError, ValueError):
        return False  # it has just ended
    return (int(its_group), int(its_session)) == (group, session) and state not in ("Z", "X")
