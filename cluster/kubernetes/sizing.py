"""What each pod needs: cores, memory, shared memory, devices, time to end. Pure.

The server is laid out as `raywire plan MODEL` would on a cluster of these pods (`layout_builder`),
so processes, rings and KV cache come from the functions that size the real ones. Beside them:

    head      API servers and coordinator; Ray's GCS, dashboard and agents. No engine core: Ray is
              told that it has no CPUs
    worker    as many engine cores as share a pod, with their workers; Ray's raylet and agents
"""

import dataclasses
import math
from dataclasses import dataclass

from cluster.config import ServeConfig
from cluster.estimate import ModelFacts
from cluster.kubernetes import stop_times
from cluster.layout import Layout, NodeLoad
from cluster.layout_builder import lay_out
from cluster.placement import Node, Resources
from engine.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30

RAY_HEAD_VCPUS = 2
"""GCS, dashboard and agents, beside the formula."""

OBJECT_STORE_BYTES = 100 * MIB
"""Nothing of ours goes through it; Ray wants at least 75 MiB."""

# Measured: resident memory of the processes, rounded up.
_RAY_HEAD_BYTES = 1536 * MIB
_RAY_WORKER_BYTES = 768 * MIB
_API_SERVER_BYTES = 512 * MIB
_COORDINATOR_BYTES = 128 * MIB
_ENGINE_CORE_BYTES = 256 * MIB
_WORKER_BYTES = 1024 * MIB
"""torch, the model's code and a step, beside weights and KV cache."""
_GPU_WORKER_BYTES = 6 * GIB
"""CUDA's context and libraries, and the weights' pages on their way to the device."""

_NCCL_BYTES = 64 * MIB
"""Of /dev/shm, for each GPU worker of a group."""
_LEAST_SHM_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSize:
    """What one pod asks for."""

    num_processes: int
    """Of ours."""
    vcpus: float
    """Two for each of them, and Ray's."""
    memory_bytes: int
    """With what lies in /dev/shm."""
    shm_bytes: int
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a server needs on Kubernetes."""

    head: PodSize
    worker: PodSize
    num_workers: int
    """Worker pods."""
    ranks_per_worker: int
    drain_s: int
    """How long running requests have once a stop is asked for."""
    job_stop_s: int
    """How long Ray waits for the driver to end."""
    head_grace_s: int
    worker_grace_s: int
    """Longer: workers are needed until the head's streams have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What an operator knows better, or has less of."""

    head_vcpus: float | None = None
    head_memory_bytes: int | None = None
    worker_vcpus: float | None = None
    worker_memory_bytes: int | None = None


def size(
    config: ServeConfig, facts: ModelFacts | None, *, has_gpus: bool, overrides: Overrides
) -> Sizes:
    """Size the pods of a server.

    Args:
        config: of the server; its ranks share pods by `data_parallel_size_local`, one a pod unless
            given.
        facts: of the model; None where it is not on this machine.
        has_gpus: whether workers compute on GPUs.
        overrides: what is not to be computed.

    Raises:
        ConfigError: ranks do not divide into pods, or the memory cannot be known.
    """
    ranks_per_worker = config.data_parallel_size_local or 1
    num_workers, rest = divmod(config.topology.num_engines, ranks_per_worker)
    if rest:
        raise ConfigError(
            f"{config.topology.num_engines} ranks do not divide into pods of {ranks_per_worker}:"
            " choose --data-parallel-size-local so that they do"
        )
    layout = _lay_out(config, facts, num_workers, ranks_per_worker, has_gpus)
    head, worker = layout.nodes[0], layout.nodes[1]
    head_grace_s = stop_times.head_grace_s(config.shutdown_timeout)
    return Sizes(
        head=_head(config, head, overrides),
        worker=_worker(config, facts, layout, worker, has_gpus, overrides),
        num_workers=num_workers,
        ranks_per_worker=ranks_per_worker,
        drain_s=math.ceil(config.shutdown_timeout),
        job_stop_s=stop_times.job_stop_s(config.shutdown_timeout),
        head_grace_s=head_grace_s,
        worker_grace_s=stop_times.worker_grace_s(head_grace_s),
    )


def _lay_out(
    config: ServeConfig,
    facts: ModelFacts | None,
    num_workers: int,
    ranks_per_worker: int,
    has_gpus: bool,
) -> Layout:
    """The server on a cluster of such pods, with room for whatever it asks."""
    workers_each = ranks_per_worker * config.topology.workers_per_engine
    engine = dataclasses.replace(config.engine, device="cuda" if has_gpus else "cpu")
    config = dataclasses.replace(
        config,
        engine=engine,
        data_parallel_backend="ray",
        data_parallel_size_local=ranks_per_worker,
    )
    room = Resources(cpus=float(workers_each), gpus=float(workers_each if has_gpus else 0))
    pods = [
        Node(node_id=f"worker-{i}", address=f"worker-{i}", total=room, available=room)
        for i in range(num_workers)
    ]
    nothing = Resources()
    head = Node(node_id="head", address="head", total=nothing, available=nothing, is_driver=True)
    return lay_out(config, [head, *pods], facts, is_counted_by_ray=False)


def _head(config: ServeConfig, load: NodeLoad, overrides: Overrides) -> PodSize:
    topology = config.topology
    memory = (
        _RAY_HEAD_BYTES
        + topology.num_api_servers * _API_SERVER_BYTES
        + topology.num_coordinators * _COORDINATOR_BYTES
        + OBJECT_STORE_BYTES
    )
    return PodSize(
        num_processes=load.num_processes,
        vcpus=overrides.head_vcpus or load.vcpus_asked + RAY_HEAD_VCPUS,
        memory_bytes=overrides.head_memory_bytes or _round_up(memory, 256 * MIB),
        shm_bytes=_LEAST_SHM_BYTES,
    )


def _worker(
    config: ServeConfig,
    facts: ModelFacts | None,
    layout: Layout,
    load: NodeLoad,
    has_gpus: bool,
    overrides: Overrides,
) -> PodSize:
    num_workers = load.num_ranks * config.topology.workers_per_engine
    rings = sum(each.num_bytes for each in layout.segments if each.node_id == load.node_id)
    shm = OBJECT_STORE_BYTES + rings * 11 // 10 + (num_workers * _NCCL_BYTES if has_gpus else 0)
    shm = max(_LEAST_SHM_BYTES, _round_up(shm, 64 * MIB))
    memory = overrides.worker_memory_bytes
    if memory is None:
        if load.memory_asked is None:
            raise ConfigError(_unknown_memory(config, facts))
        each = _GPU_WORKER_BYTES if has_gpus else _WORKER_BYTES
        memory = (
            _RAY_WORKER_BYTES
            + load.num_ranks * _ENGINE_CORE_BYTES
            + num_workers * each
            + (load.memory_asked - rings)
            + shm
        )
    return PodSize(
        num_processes=load.num_processes,
        vcpus=overrides.worker_vcpus or load.vcpus_asked,
        memory_bytes=_round_up(memory, 256 * MIB),
        shm_bytes=shm,
        gpus=num_workers if has_gpus else 0,
    )


def _unknown_memory(config: ServeConfig, facts: ModelFacts | None) -> str:
    wants = []
    if facts is None:
        model = config.engine.model
        wants.append(f"{model} is not on this machine: `raywire serve {model}` once fetches it")
    if config.engine.kv_cache_memory_bytes is None:
        wants.append("the KV cache has no size: give --kv-cache-memory-bytes")
    return f"the memory of a worker pod is not known ({'; '.join(wants)}), or give --worker-memory"


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
