"""What a server will consist of, as records: ranks on nodes and devices, processes, wires, shared
memory, and what that asks of each node. Made by `layout_builder`, shown by `layout_text`.
"""

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    title: str
    """As `ps` shows it; a Ray actor may have the method that runs after a dot."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    kind: str
    sockets: str
    """Of who binds and who connects."""

    binds: str
    connects: tuple[str, ...]
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A ring in shared memory. It has no name: it lives with the processes that have it."""

    kind: str
    writer: str
    readers: tuple[str, ...]
    node_id: str
    num_chunks: int
    chunk_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeed:
    """What each worker of a rank takes, estimated."""

    weight_bytes: int
    """Of the largest."""

    kv_bytes_per_token: int
    """Of the largest."""

    kv_cache_bytes: int | None
    """None on a GPU: 90% of what is free once the weights are there."""

    kv_tokens: int | None
    """In the cache of the whole rank."""

    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    rank: int
    node_id: str
    address: str
    local_rank: int
    devices: tuple[int, ...]
    """GPUs, numbered among those that the server takes on the node; empty: CPUs."""

    need: RankNeed | None
    """None where the model is not here yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """What is asked of a node, and what it has."""

    node_id: str
    address: str
    is_driver: bool
    num_ranks: int
    num_processes: int
    vcpus_asked: int
    """Two for each process."""

    vcpus_there: float
    reserved_cpus: int
    """What Ray takes off its count; it limits no process."""

    reserved_gpus: int
    gpus_there: float
    memory_asked: int | None
    """Weights, KV cache and rings, in bytes, in the machine's own memory."""

    memory_available: int
    """0: not known. Ray tells what it may hand out, which is less than the machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One of several servers, each with an endpoint of its own."""

    title: str
    """Of the actor that runs it."""

    node_id: str
    first_rank: int
    num_ranks: int
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    model: str
    flags: str
    backend: str
    strategy: str
    dtype: str | None
    formula: str
    ranks: tuple[RankPlan, ...]
    processes: tuple[Process, ...]
    wires: tuple[Wire, ...]
    segments: tuple[Segment, ...]
    nodes: tuple[NodeLoad, ...]
    min_vcpus: int
    warnings: tuple[str, ...] = ()
    servers: tuple[ServerPlan, ...] = ()
    """Empty: it is one server (else see `hybrid_layout`)."""

    def to_json(self) -> Any:
        """For machines: the fields as they are."""
        return msgspec.to_builtins(self)
