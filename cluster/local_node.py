"""This machine as a node to place ranks on: what there is without a Ray cluster.

GPUs are counted without torch, by what the driver shows and CUDA_VISIBLE_DEVICES leaves.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from cluster.placement import Node, RankDemand, Resources, demand_of
from workers import resources

_DRIVER = Path("/proc/driver/nvidia/gpus")
"""One entry for each GPU, also in containers that were given some of them."""


def observe(visible_devices: str | None = None) -> Node:
    """Look at this machine. What other programs use of its memory is not available.

    Args:
        visible_devices: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    cpus = float(resources.available_cores())
    gpus = float(num_visible(visible_devices, sum(1 for _ in _driver_entries())))
    return Node(
        node_id="local",
        address="127.0.0.1",
        total=Resources(cpus=cpus, gpus=gpus, memory_bytes=resources.total_memory()),
        available=Resources(cpus=cpus, gpus=gpus, memory_bytes=resources.available_memory()),
        is_driver=True,
    )


def demand_here(
    nodes: Iterable[Node],
    num_workers: int,
    *,
    device: Literal["auto", "cpu", "cuda"],
    is_scripted: bool,
) -> RankDemand:
    """What a rank of so many workers asks of this machine. Nobody reserves here, so CPUs are
    shared, and a scripted model, which computes nothing, asks for no GPU."""
    if is_scripted and device == "auto":
        device = "cpu"
    return demand_of(nodes, num_workers, device=device, are_cpus_shared=True)


def _driver_entries() -> list[Path]:
    try:
        return list(_DRIVER.iterdir())
    except OSError:
        return []


def num_visible(visible_devices: str | None, num_gpus: int) -> int:
    """How many of the GPUs a process may use. CUDA stops at the first name that is none."""
    if visible_devices is None:
        return num_gpus
    count = 0
    for name in visible_devices.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        count += 1
    return min(count, num_gpus)
