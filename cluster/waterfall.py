"""How long each stage of a start took, for one line in the log. Pure but for `process_age_s`."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path


class Waterfall:
    """Stages in the order in which they ended.

    Args:
        already_s: what had passed before the clock started: interpreter and imports.
        clock: seconds, monotonic.
    """

    def __init__(self, already_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._last = clock()
        self._already_s = already_s
        self._stages = {"imports": already_s}

    def mark(self, stage: str) -> None:
        """`stage` ends now."""
        now = self._clock()
        self._stages[stage] = self._stages.get(stage, 0.0) + now - self._last
        self._last = now

    def mark_before(self, stage: str, seconds: float) -> None:
        """`stage` ended `seconds` ago, as somebody else's clock has it."""
        end = max(self._last, self._clock() - seconds)
        self._stages[stage] = self._stages.get(stage, 0.0) + end - self._last
        self._last = end

    def mark_chain(self, first: str, chain: Mapping[str, float]) -> None:
        """`first` ends, and then stages that took so many seconds each, the last of them now."""
        left_s = sum(chain.values())
        self.mark_before(first, left_s)
        for stage, seconds in chain.items():
            left_s -= seconds
            self.mark_before(stage, left_s)

    @property
    def total_s(self) -> float:
        return self._already_s + self._last - self._start

    def __str__(self) -> str:
        return " ".join(f"{stage}={seconds:.1f}s" for stage, seconds in self._stages.items())


def process_age_s() -> float:
    """Seconds since this process was started by the kernel; 0 where that cannot be read."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
