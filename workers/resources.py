"""What a worker may use of its machine: cores, memory, and how its threads wait. Without torch.

Containers show the host's cores and memory; what counts is the smaller of them and the limits of
our control group. `process.py` calls `prepare_environment` before torch is imported, because OpenMP
reads its variables only once, when it is loaded.
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from engine.config import EngineConfig

CPU_KV_BYTES = 1 << 30
"""KV cache of a machine's engines together, unless a quarter of its memory is less."""

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60

# Rounds of a busy wait before an OpenMP thread sleeps: some ten microseconds. Left alone, threads
# spin for milliseconds and starve the processes that share their cores.
_SPIN_COUNT = "10000"

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BELOW_BYTES = 1 << 30


def num_local_workers(config: EngineConfig) -> int:
    """Workers that share this machine's cores and memory, over all its engine cores."""
    return config.parallel.world_size * config.executor.num_local_engines


def num_threads(config: EngineConfig) -> int:
    """Compute threads of one worker on CPU: what the user says (OMP_NUM_THREADS), else its share of
    the cores. None is bound to a core: the kernel spreads them, also those of several engines."""
    if config.executor.num_threads is not None:
        return config.executor.num_threads
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return max(1, available_cores() // num_local_workers(config))


def prepare_environment(config: EngineConfig) -> None:
    """Set what the C libraries under torch read when they are loaded. What the user has set
    stays."""
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads(config)))
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    # The workers of one engine are always on one machine: nothing of theirs leaves it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _keep_large_allocations()


def cpu_kv_budget(free_bytes: int, world_size: int, num_local_engines: int) -> int:
    """What a worker on CPU may give to its KV cache unless the user says.

    Args:
        free_bytes: memory that is left once the weights are loaded.
        world_size: workers of its engine core. Each has the KV of its own heads or layers, so they
            all get as much; free memory, which they do share, limits them together.
        num_local_engines: engine cores on this machine.
    """
    return min(CPU_KV_BYTES, free_bytes // 4 // world_size) // num_local_engines


def available_cores() -> int:
    """Cores this process may keep busy."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for folder in cgroups("cpu"):
        # "max" in version 2 and -1 in version 1 are no limit.
        quota, period = read(folder / "cpu.max").split() or (
            read(folder / "cpu.cfs_quota_us").strip(),
            read(folder / "cpu.cfs_period_us").strip(),
        )
        if quota.isdecimal():
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def total_memory() -> int:
    """Bytes of memory this process could ever have."""
    return min([_meminfo("MemTotal"), *map(_memory_limit, cgroups("memory"))])


def available_memory() -> int:
    """Bytes of memory this process could still get without swapping or being killed."""
    return min([_meminfo("MemAvailable"), *map(_headroom, cgroups("memory"))])


def group_memory_limit() -> int | None:
    """Bytes that our control group may use; None where there is no limit."""
    limit = min([_UNLIMITED, *map(_memory_limit, cgroups("memory"))])
    return limit if limit < min(_UNLIMITED, _meminfo("MemTotal")) else None


def resident_memory() -> int:
    """Bytes of memory this process occupies now."""
    pages = read(Path("/proc/self/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _headroom(cgroup: Path) -> int:
    limit = _memory_limit(cgroup)
    if limit == _UNLIMITED:
        return limit
    is_version_2 = (cgroup / "memory.max").exists()
    used = int(read(cgroup / ("memory.current" if is_version_2 else "memory.usage_in_bytes")) or 0)
    # Cached file pages count as used, yet are given up when memory is wanted.
    for line in read(cgroup / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == ("inactive_file" if is_version_2 else "total_inactive_file"):
            used -= int(value)
    return max(0, limit - used)


def _memory_limit(cgroup: Path) -> int:
    text = read(cgroup / "memory.max") or read(cgroup / "memory.limit_in_bytes")
    return min(int(text), _UNLIMITED) if text.strip().isdecimal() else _UNLIMITED


def cgroups(controller: Literal["cpu", "memory"]) -> Iterator[Path]:
    """Our control group and all above it, as far as they are visible: of version 2, and of version
    1, in which each controller has groups of its own."""
    for line in read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
        folder = root / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(root))


def _meminfo(field: str) -> int:
    for line in read(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return _UNLIMITED


def read(file: Path | str) -> str:
    """A file of the kernel's, or nothing where this kernel or container does not show it."""
    try:
        return Path(file).read_text()
    except OSError:
        return ""


def _keep_large_allocations() -> None:
    """Let malloc keep large blocks for the next step.

    By default glibc maps every block above 32 MiB afresh, so that a step's logits cost a page fault
    per 4 KiB.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BELOW_BYTES)
