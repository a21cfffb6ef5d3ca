"""The machine under a benchmark: what it is, what it does beside us, what our processes take."""

import contextlib
import os
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil


def describe() -> str:
    """Processor, cores and memory in a line."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{name}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {platform.release()}"


@dataclass(slots=True)
class Load:
    """What a stretch of time had of the processors."""

    wall_s: float = 0.0
    ours: float = 0.0
    """Share of all cores that went to the processes we started (and have waited for)."""
    others: float = 0.0
    """Share that went to everybody else: figures taken beside much of it are no figures."""


@contextmanager
def watch() -> Iterator[Load]:
    """Fill in a `Load` when the block ends. What runs in it must have ended by then."""
    load = Load()
    began, busy_before, ours_before = time.monotonic(), busy_s(), _our_cpu_s()
    try:
        yield load
    finally:
        load.wall_s = time.monotonic() - began
        capacity = max(load.wall_s * (os.cpu_count() or 1), 1e-9)
        ours = _our_cpu_s() - ours_before
        load.ours = ours / capacity
        load.others = max(0.0, busy_s() - busy_before - ours) / capacity


def busy_s() -> float:
    """Seconds that all cores together have worked, for whomever, since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _our_cpu_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    title: str
    pss_mib: float
    """Private memory, and its share of what it shares with others: the sum over processes is what
    they take together."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has had of the cores so far, and what it has missed."""

    title: str
    cpu_s: float
    """On a core, all its threads together."""
    wait_s: float
    """Ready to run, while others had the cores."""


@dataclass(slots=True)
class Tree:
    """A process and all it has started."""

    root: psutil.Process
    _seen: dict[int, psutil.Process] = field(default_factory=dict)

    def processes(self) -> list[psutil.Process]:
        for process in (self.root, *self.root.children(recursive=True)):
            self._seen.setdefault(process.pid, process)
        return [p for p in self._seen.values() if p.is_running()]

    def memory(self) -> list[ProcessMemory]:
        found = []
        for process in self.processes():
            pss = _pss_mib(process.pid)
            if pss > 0:
                found.append(ProcessMemory(_title(process), pss))
        return found

    def cpu_s(self) -> float:
        """User and system time of all that live."""
        total = 0.0
        for process in self.processes():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total

    def usages(self) -> dict[int, Usage]:
        """By pid."""
        return {process.pid: usage(process) for process in self.processes()}


def usage(process: psutil.Process) -> Usage:
    """What one process has had so far. From the scheduler's own accounts, to the nanosecond:
    /proc/PID/stat has hundredths."""
    cpu_ns = wait_ns = 0
    for account in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            ran, waited, _ = account.read_text(encoding="ascii").split()
            cpu_ns += int(ran)
            wait_ns += int(waited)
    return Usage(_title(process), cpu_ns / 1e9, wait_ns / 1e9)


def _title(process: psutil.Process) -> str:
    """As `ps` shows it, short: the first word of a title, or the module that Python runs."""
    words = process.cmdline()
    if not words:
        return process.name()
    if "multiprocessing.resource_tracker" in " ".join(words):
        return "resource tracker"
    first = words[0].split()[0]
    if "python" not in Path(first).name or len(words) == 1:
        return first
    return " ".join(Path(word).name for word in words[:4])


def _pss_mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0
