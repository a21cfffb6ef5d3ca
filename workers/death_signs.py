"""What the machine knows of a process's death: whether the kernel was out of memory, whether
/dev/shm is full. Used by whoever watches processes, for the line with the first cause.

A process that is killed says nothing, and SIGKILL looks the same from a `kill -9` and from the
kernel's OOM killer. But the kernel counts what it has killed: for each control group, and for the
whole machine. It does not say whom, so a count that has grown since the last death is a sign and no
proof.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from workers import resources

_SHM = "/dev/shm"
_NO_SPACE = ("No space left on device", "Errno 28", "Bus error")

_TOGETHER_S = 10.0
"""Deaths within so long may have one reason, of which the kernel counts a kill or several."""


@dataclass(frozen=True, slots=True)
class OomKills:
    """How many processes the kernel's OOM killer has ended so far."""

    of_group: int | None
    """Of our control group; of version 2 also of those below it. None: not to be seen from here."""

    of_machine: int | None
    """Since it was booted."""

    @classmethod
    def read(cls) -> "OomKills":
        return cls(_group_kills(), _count(resources.read("/proc/vmstat"), "oom_kill"))


class DeathSigns:
    """Explains deaths of processes that start after it was made. What the kernel had killed by an
    earlier one is no sign for a later one.

    Args:
        before: what had been counted by then; None: now.
    """

    def __init__(
        self, before: OomKills | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._before = self._seen = before or OomKills.read()
        self._clock = clock
        self._since = "the start"
        self._looked_at: float | None = None
        """When the last death was explained; by then `_seen` had been counted."""

    def of_exit(self, exit_code: int | None) -> str:
        """What is to be added to `killed by SIGKILL` and the like: nothing, or `; …`."""
        self._look()
        if exit_code == -signal.SIGKILL:
            return self._of_memory()
        if exit_code == -signal.SIGBUS:
            return f"; {_shm_room()}"
        return ""

    def of_error(self, message: str) -> str:
        """The same of what a process has said itself."""
        return f"; {_shm_room()}" if any(words in message for words in _NO_SPACE) else ""

    def _look(self) -> None:
        """Read the counts. What had been counted when another died is old by now."""
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at > _TOGETHER_S:
            self._before, self._since = self._seen, "the death before"
        self._seen, self._looked_at = OomKills.read(), now

    def _of_memory(self) -> str:
        before, now = self._before, self._seen
        if grown := _grown(before.of_group, now.of_group):
            limit = resources.group_memory_limit()
            told = "" if limit is None else f", which may use {limit / 2**20:.0f} MiB"
            where = f"in the control group{told}"
            return f"; out of memory, probably: {_kills(grown)} since {self._since} {where}"
        if grown := _grown(before.of_machine, now.of_machine):
            where = "on this machine"
            return f"; out of memory, perhaps: {_kills(grown)} since {self._since} {where}"
        if now.of_group is None and now.of_machine is None:
            return ""
        return "; not by the kernel's OOM killer"


def _grown(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else max(0, now - before)


def _kills(count: int) -> str:
    return f"{count} OOM kill{'' if count == 1 else 's'}"


def _group_kills() -> int | None:
    for folder in resources.cgroups("memory"):
        # Version 2, and version 1.
        for file in ("memory.events", "memory.oom_control"):
            if (kills := _count(resources.read(folder / file), "oom_kill")) is not None:
                return kills
    return None


def _count(text: str, name: str) -> int | None:
    """The number behind a name, in one of the kernel's tables."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def _shm_room() -> str:
    try:
        room = os.statvfs(_SHM)
    except OSError:
        return f"{_SHM} cannot be seen"
    free, size = (blocks * room.f_frsize / 2**20 for blocks in (room.f_bavail, room.f_blocks))
    return f"{_SHM} has {free:.0f} of {size:.0f} MiB free"
