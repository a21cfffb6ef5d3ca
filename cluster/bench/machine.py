"""The machine under a benchmark: what it is, what it does beside us, what our processes take.

Read from /proc, so that a user's installation needs nothing more.
"""

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BUSY_SHARE = 0.05
"""Others that have more of the cores than this spoil what is measured."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


_ARITHMETIC = {
    "amx_tile": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "asimd": "NEON",
}
"""What a processor computes with, the best first: flag to name."""


def describe() -> str:
    """Processor, what it computes with, cores and memory in a line."""
    facts = _cpu_facts(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts:
        name += f" (family {facts['cpu family']}, model {facts.get('model', '?')})"
    if (best := arithmetic(facts.get("flags") or facts.get("Features") or "")) is not None:
        name += f" with {best}"
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{name}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {_kernel_version()}"


def arithmetic(flags: str) -> str | None:
    """The widest arithmetic among a processor's flags: two of a name may differ in it."""
    present = set(flags.split())
    return next((name for flag, name in _ARITHMETIC.items() if flag in present), None)


def _cpu_facts(cpuinfo: str) -> dict[str, str]:
    """Of the first core in /proc/cpuinfo."""
    pairs = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _kernel_version() -> str:
    """6.18.44 of 6.18.44-so-and-so."""
    return platform.release().partition("-")[0]


@dataclass(slots=True)
class Load:
    """What a stretch of time had of the processors."""

    wall_s: float = 0.0
    ours: float = 0.0
    """Share of all cores that went to this process and what it has started."""
    others: float = 0.0
    """Share that went to everybody else: figures taken beside much of it are no figures."""

    @property
    def is_spoiled(self) -> bool:
        return self.others > BUSY_SHARE


@contextmanager
def watch(*bystanders: "Tree") -> Iterator[Load]:
    """Fill in a `Load` when the block ends. Ours is this process and all below it, but for
    `bystanders`, which should do nothing meanwhile: they count as others."""
    load = Load()
    own = Tree(os.getpid())

    def ours_s() -> float:
        return own.cpu_s() - sum(tree.cpu_s() for tree in bystanders)

    began, busy_before, ours_before = time.monotonic(), busy_s(), ours_s()
    try:
        yield load
    finally:
        load.wall_s = time.monotonic() - began
        capacity = max(load.wall_s * (os.cpu_count() or 1), 1e-9)
        ours = ours_s() - ours_before
        load.ours = ours / capacity
        load.others = min(1.0, max(0.0, busy_s() - busy_before - ours) / capacity)


def others_now(seconds: float) -> float:
    """Share of all cores that somebody has while this process waits for so long."""
    with watch() as load:
        time.sleep(seconds)
    return load.others


def busy_s() -> float:
    """Seconds that all cores together have worked, for whomever, since the machine started."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


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

    root: int
    """Its pid."""
    _seen: dict[int, int] = field(default_factory=dict)
    """When a process began, by pid: one that has lost its parent still belongs here."""

    def pids(self) -> list[int]:
        """Of all that live."""
        processes = {pid: found for pid in _all_pids() if (found := _stat(pid)) is not None}
        members = {pid for pid, found in processes.items() if self._seen.get(pid) == found.began}
        members |= {self.root} & processes.keys()
        while (
            young := {pid for pid, found in processes.items() if found.parent in members} - members
        ):
            members |= young
        self._seen = {pid: processes[pid].began for pid in members}
        return sorted(members)

    def memory(self) -> list[ProcessMemory]:
        found = []
        for pid in self.pids():
            pss = _pss_mib(pid)
            if pss > 0:
                found.append(ProcessMemory(_title(pid), pss))
        return found

    def cpu_s(self) -> float:
        """User and system time of all that live, and of what these have started and waited for."""
        found = [_stat(pid) for pid in self.pids()]
        return sum(each.cpu_s for each in found if each is not None)

    def usages(self) -> dict[int, Usage]:
        """By pid."""
        return {pid: usage(pid) for pid in self.pids()}


def usage(pid: int) -> Usage:
    """What one process has had so far. From the scheduler's own accounts, to the nanosecond:
    /proc/PID/stat has hundredths."""
    cpu_ns = wait_ns = 0
    for account in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            ran, waited, _ = account.read_text(encoding="ascii").split()
            cpu_ns += int(ran)
            wait_ns += int(waited)
    return Usage(_title(pid), cpu_ns / 1e9, wait_ns / 1e9)


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    cpu_s: float
    began: int
    """In ticks since the machine started."""


def _stat(pid: int) -> _Stat | None:
    """None once the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # user and system: its own, and of waited-for children
    return _Stat(int(fields[1]), ticks / _TICKS_PER_S, int(fields[19]))


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _title(pid: int) -> str:
    """As `ps` shows it, short: the first word of a title, or the module that Python runs."""
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "gone"
    words = content.decode(errors="replace").rstrip("\0").split("\0")
    if not words[0]:
        return "kernel"
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
