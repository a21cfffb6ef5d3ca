"""Lays out a server before anything starts. Pure; `dry_run` observes, and `raywire plan MODEL`
shows the `Layout`.

Placement, ring sizes and KV cache come from the functions that the launch, the workers and the
engine core use, so a layout that they would refuse is refused here, in the same words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cluster import estimate
from cluster.config import EngineOptions, ServeConfig
from cluster.estimate import ModelFacts, WorkerNeed
from cluster.layout import Layout, NodeLoad, Process, RankNeed, RankPlan, Segment, Wire
from cluster.local_node import demand_here
from cluster.placement import (
    BusyError,
    Node,
    Placement,
    RankDemand,
    RankPlace,
    Strategy,
    demand_of,
    place,
)
from cluster.plan import VCPUS_PER_PROCESS
from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.kv_sizing import KVCacheSize
from workers import ring
from workers.executor import BROADCAST_CHUNKS
from workers.process import rank_name
from workers.shared_memory import RINGS_SHARE_OF_FREE, fit_chunk_bytes
from workers.worker_handle import RESPONSE_CHUNKS

GIB = 1 << 30
MIB = 1 << 20

_VARLEN_BLOCK_SIZE = 256
"""Tokens of a KV block, as that attention back end reads it best."""


def lay_out(
    config: ServeConfig,
    nodes: Sequence[Node],
    facts: ModelFacts | None,
    *,
    is_counted_by_ray: bool | None = None,
) -> Layout:
    """Lay out a server on nodes as they are now.

    Args:
        config: what was asked for.
        nodes: of the Ray cluster, or this machine alone.
        facts: of the model; None where it is not on this machine yet.
        is_counted_by_ray: whether the nodes are as Ray describes them. None: with its back end.

    Raises:
        ConfigError: a start would be refused; one message that says why and what to do.
    """
    _check_ring_readers(config.engine)
    demand = _demand(config, nodes, facts)
    placement = place_now(
        config,
        nodes,
        demand,
        config.topology.num_engines,
        config.strategy,
        config.data_parallel_size_local,
    )
    if is_counted_by_ray is None:
        is_counted_by_ray = config.backend == "ray"
    return _Builder(config, nodes, facts, demand, placement, is_counted_by_ray).build()


def _demand(config: ServeConfig, nodes: Sequence[Node], facts: ModelFacts | None) -> RankDemand:
    device, num_workers = config.engine.device, config.topology.workers_per_engine
    if config.backend == "ray":
        return demand_of(nodes, num_workers, device=device)
    is_scripted = facts is not None and facts.shape is None
    return demand_here(nodes, num_workers, device=device, is_scripted=is_scripted)


def _check_ring_readers(options: EngineOptions) -> None:
    num_workers = options.tensor_parallel_size * options.pipeline_parallel_size
    if num_workers > ring.MAX_READERS:
        raise ConfigError(
            f"{num_workers} workers in one engine core (tensor × pipeline parallel size): a ring"
            f" has at most {ring.MAX_READERS} readers"
        )


def place_now(
    config: ServeConfig,
    nodes: Sequence[Node],
    demand: RankDemand,
    num_ranks: int,
    strategy: Strategy,
    ranks_per_node: int | None,
) -> Placement:
    """`placement.place` for people: for a busy cluster it says how long a start would wait."""
    try:
        return place(nodes, demand, num_ranks, strategy, ranks_per_node)
    except BusyError as error:
        raise ConfigError(
            f"{error}. `raywire serve` would wait {config.placement_timeout:g} s for it"
            " (--placement-timeout)"
        ) from error


@dataclass(slots=True)
class _Builder:
    """Collects what follows from a placement."""

    config: ServeConfig
    nodes: Sequence[Node]
    facts: ModelFacts | None
    demand: RankDemand
    placement: Placement
    is_counted_by_ray: bool
    warnings: list[str] = field(default_factory=list)

    def build(self) -> Layout:
        config, topology = self.config, self.config.topology
        chunk_bytes = {node.node_id: self._chunk_bytes(node) for node in self.placement.nodes}
        segments = tuple(self._segments(chunk_bytes))
        ranks = self._ranks(segments)
        processes = tuple(self._processes())
        assert len(processes) == topology.num_processes
        loads = tuple(self._load(node, ranks, processes, segments) for node in self._used_nodes())
        wires = tuple(self._wires())
        self._check_ports(wires)
        dtype = None if self.facts is None else estimate.dtype_of(self.facts, config.engine.dtype)
        return Layout(
            model=config.engine.model,
            flags=topology.flags,
            backend=config.backend,
            strategy=config.strategy,
            dtype=dtype,
            formula=_formula(config),
            ranks=ranks,
            processes=processes,
            wires=wires,
            segments=segments,
            nodes=loads,
            min_vcpus=topology.min_vcpus,
            warnings=tuple(self.warnings),
        )

    # ------------------------------------------------------------------ who is where

    @property
    def _driver_id(self) -> str:
        """The node of the command and its API servers."""
        return next((node.node_id for node in self.nodes if node.is_driver), "elsewhere")

    def _used_nodes(self) -> list[Node]:
        """The command's node first, then those of the ranks."""
        drivers = [node for node in self.nodes if node.is_driver]
        return drivers + [node for node in self.placement.nodes if not node.is_driver]

    def _processes(self) -> Iterator[Process]:
        topology = self.config.topology
        for i in range(topology.num_api_servers):
            yield Process(title=_api_server(i), node_id=self._driver_id)
        if topology.num_coordinators:
            yield Process(title=self._coordinator, node_id=self._driver_id)
        for rank, each in self._places():
            yield Process(title=self._engine_core(rank), node_id=each.node.node_id)
            for worker in self._workers(rank):
                yield Process(title=worker, node_id=each.node.node_id)

    def _places(self) -> Iterator[tuple[int, RankPlace]]:
        """Data-parallel ranks and their places. The first rank is not 0 where other servers have
        those before it."""
        return zip(self.config.ranks, self.placement.ranks, strict=True)

    @property
    def _coordinator(self) -> str:
        return self._title("DPCoordinator")

    def _engine_core(self, rank: int) -> str:
        return self._title(f"EngineCore_DP{rank}")

    def _title(self, name: str) -> str:
        return f"{'ray' if self.config.backend == 'ray' else 'RAYWIRE'}::{name}"

    def _workers(self, rank: int) -> tuple[str, ...]:
        """Titles by worker rank: child processes of their engine core, wherever that is."""
        parallel: ParallelConfig = self.config.engine.parallel_config(rank)
        return tuple(
            f"RAYWIRE::Worker_{rank_name(parallel, worker)}"
            for worker in range(parallel.world_size)
        )

    # ------------------------------------------------------------------ wires

    def _wires(self) -> Iterator[Wire]:
        topology = self.config.topology
        api_servers = tuple(_api_server(i) for i in range(topology.num_api_servers))
        engine_cores = tuple(self._engine_core(rank) for rank in self.config.ranks)
        http = f"tcp {self.config.host} port {self.config.port or 'of the kernel'}"
        for name in api_servers:
            yield Wire(kind="HTTP", sockets="", binds=name, connects=("clients",), address=http)
        between = self._address()
        for name in api_servers:
            yield _zmq("requests", "ROUTER < DEALER", name, engine_cores, between)
            yield _zmq("outputs", "PULL < PUSH", name, engine_cores, between)
        if topology.num_coordinators:
            name = self._coordinator
            yield _zmq("waves", "ROUTER < DEALER", name, engine_cores, between)
            yield _zmq("statistics", "PULL < PUSH", name, engine_cores + api_servers, between)
            yield _zmq("load reports", "XPUB < SUB", name, api_servers, between)
        for rank in self.config.ranks:
            yield from self._wires_of(rank)

    def _wires_of(self, rank: int) -> Iterator[Wire]:
        """Inside one engine core: its workers are always on its node."""
        name, workers = self._engine_core(rank), self._workers(rank)
        for worker in workers:
            yield _zmq("large calls", "side channel", name, (worker,), "ipc")
            yield _zmq("large replies", "side channel", name, (worker,), "ipc")
        is_scripted = self.facts is not None and self.facts.shape is None
        if len(workers) > 1 and not is_scripted:
            address = "NCCL" if self.demand.gpus else "gloo, loopback"
            yield Wire(
                kind="collectives",
                sockets="torch",
                binds=workers[0],
                connects=workers[1:],
                address=address,
            )

    def _address(self) -> str:
        """Of the wires between API servers, coordinator and engine cores."""
        if self.placement.is_local:
            return "ipc"
        host = next((node.address for node in self.nodes if node.is_driver), "the command's node")
        ports = self.config.wire_port_range
        port = "port of the kernel" if ports is None else f"ports {ports[0]}-{ports[1]}"
        return f"tcp {host} {port}, encrypted"

    def _check_ports(self, wires: Sequence[Wire]) -> None:
        if self.config.wire_port_range is None or self.placement.is_local:
            return
        first, last = self.config.wire_port_range
        needed = sum(wire.address == self._address() for wire in wires)
        if last - first + 1 < needed:
            raise ConfigError(
                f"--wire-port-range {first}-{last} has {last - first + 1} ports, and"
                f" {self.config.topology.num_api_servers} API servers and a coordinator bind"
                f" {needed}"
            )

    # ------------------------------------------------------------------ shared memory

    def _chunk_bytes(self, node: Node) -> int:
        """Of all rings on a node, which may have memory for smaller ones only."""
        wanted = self.config.environment.mq_max_chunk_bytes
        if not node.available.memory_bytes:
            return wanted
        num_chunks = BROADCAST_CHUNKS + RESPONSE_CHUNKS * self.config.topology.workers_per_engine
        share = node.available.memory_bytes // RINGS_SHARE_OF_FREE
        fitting = fit_chunk_bytes(wanted, num_chunks, share // len(self.placement.on(node)))
        if fitting < wanted:
            self.warnings.append(
                f"{node.label}: ring chunks shrink from {wanted / MIB:.1f} to {fitting / MIB:.1f}"
                " MiB; larger messages take the side channel"
            )
        return fitting

    def _segments(self, chunk_bytes: dict[str, int]) -> Iterator[Segment]:
        for rank, each in self._places():
            name, workers = self._engine_core(rank), self._workers(rank)
            rings = [("calls", name, workers, BROADCAST_CHUNKS)]
            rings += [("replies", worker, (name,), RESPONSE_CHUNKS) for worker in workers]
            for kind, writer, readers, num_chunks in rings:
                size = ring.Layout(num_chunks, chunk_bytes[each.node.node_id], len(readers))
                yield Segment(
                    kind=kind,
                    writer=writer,
                    readers=readers,
                    node_id=each.node.node_id,
                    num_chunks=num_chunks,
                    chunk_bytes=size.chunk_bytes,
                    num_bytes=size.num_bytes,
                )

    # ------------------------------------------------------------------ memory

    def _ranks(self, segments: Sequence[Segment]) -> tuple[RankPlan, ...]:
        needs = {node.node_id: self._need(node, segments) for node in self.placement.nodes}
        return tuple(
            RankPlan(
                rank=rank,
                node_id=each.node.node_id,
                address=each.node.address,
                local_rank=each.local_rank,
                devices=each.devices,
                need=needs[each.node.node_id],
            )
            for rank, each in self._places()
        )

    def _need(self, node: Node, segments: Sequence[Segment]) -> RankNeed | None:
        """Of each rank on this node."""
        if self.facts is None:
            return None
        needs = estimate.worker_needs(self.facts, self.config.engine)
        largest = max(needs, key=lambda need: need.weight_bytes)
        if not self.demand.gpus:
            self._check_weights(node, largest)
        budget = self._kv_budget(node, needs, segments)
        size = None if budget is None else self._size_kv(node, budget)
        return RankNeed(
            weight_bytes=largest.weight_bytes,
            kv_bytes_per_token=max(need.kv_bytes_per_token for need in needs),
            kv_cache_bytes=budget,
            kv_tokens=None if size is None else size.num_tokens,
            max_model_len=None if size is None else size.max_model_len,
        )

    def _check_weights(self, node: Node, largest: WorkerNeed) -> None:
        """As the loader does: what is there, divided among the workers of the node."""
        num_local = len(self.placement.on(node)) * self.config.topology.workers_per_engine
        share = node.total.memory_bytes // num_local
        if node.total.memory_bytes and largest.weight_bytes > share:
            self._refuse_or_warn(
                f"{node.label}: the model's weights need {_gib(largest.weight_bytes)} on each of"
                f" {num_local} workers, and each has {_gib(share)}; use more nodes or more memory,"
                " or a larger --tensor-parallel-size"
            )

    def _kv_budget(
        self, node: Node, needs: Sequence[WorkerNeed], segments: Sequence[Segment]
    ) -> int | None:
        """KV cache of each worker on this node; None: not known before it has loaded."""
        assert self.facts is not None
        options = self.config.engine
        is_asked = options.kv_cache_memory_bytes is not None or self.facts.shape is None
        if not is_asked and (self.demand.gpus or not node.available.memory_bytes):
            return None
        num_engines = len(self.placement.on(node))
        weights = sum(need.weight_bytes for need in needs) * options.tensor_parallel_size
        free = node.available.memory_bytes - weights * num_engines - _ring_bytes(node, segments)
        return estimate.kv_budget(self.facts, options, free, num_engines)

    def _size_kv(self, node: Node, budget: int) -> KVCacheSize | None:
        assert self.facts is not None
        options = self.config.engine
        is_varlen = bool(self.demand.gpus) or options.attention_backend == "varlen"
        is_large = is_varlen and self.facts.shape is not None
        block_size = _VARLEN_BLOCK_SIZE if is_large else estimate.CPU_BLOCK_SIZE
        try:
            size = estimate.size_kv(self.facts, options, budget, block_size)
        except ConfigError as error:
            self._refuse_or_warn(f"{node.label}: {error}")
            return None
        if options.max_model_len is None and size.max_model_len < self.facts.max_len:
            self.warnings.append(
                f"{node.label}: max_model_len will be {size.max_model_len} instead of the model's"
                f" {self.facts.max_len}: the KV cache holds no more; --kv-cache-memory-bytes"
                " enlarges it"
            )
        return size

    def _refuse_or_warn(self, message: str) -> None:
        """Of this machine we know what it has. Of others Ray tells what it may hand out, which is
        less."""
        if not self.is_counted_by_ray:
            raise ConfigError(message)
        self.warnings.append(f"{message} (by Ray's count of its memory)")

    def _load(
        self,
        node: Node,
        ranks: Sequence[RankPlan],
        processes: Sequence[Process],
        segments: Sequence[Segment],
    ) -> NodeLoad:
        local = [rank for rank in ranks if rank.node_id == node.node_id]
        num_processes = sum(process.node_id == node.node_id for process in processes)
        is_counted = self.config.backend == "ray"
        load = NodeLoad(
            node_id=node.node_id,
            address=node.address,
            is_driver=node.is_driver,
            num_ranks=len(local),
            num_processes=num_processes,
            vcpus_asked=VCPUS_PER_PROCESS * num_processes,
            vcpus_there=node.total.cpus,
            reserved_cpus=self.demand.cpus * len(local) if is_counted else 0,
            reserved_gpus=self.demand.gpus * len(local) if is_counted else 0,
            gpus_there=node.total.gpus,
            memory_asked=self._memory_asked(node, local, segments),
            memory_available=node.available.memory_bytes,
        )
        self._warn_about(node, load)
        return load

    def _memory_asked(
        self, node: Node, local: Sequence[RankPlan], segments: Sequence[Segment]
    ) -> int | None:
        rings = _ring_bytes(node, segments)
        if self.demand.gpus or not local:
            return rings  # weights and KV are in the GPUs' memory
        if self.facts is None or (need := local[0].need) is None or need.kv_cache_bytes is None:
            return None
        options = self.config.engine
        stages = estimate.worker_needs(self.facts, options)
        each = sum(stage.weight_bytes + need.kv_cache_bytes for stage in stages)
        return rings + each * options.tensor_parallel_size * len(local)

    def _warn_about(self, node: Node, load: NodeLoad) -> None:
        if load.vcpus_asked > load.vcpus_there:
            self.warnings.append(
                f"{node.label}: {load.num_processes} processes want {load.vcpus_asked} vCPUs, and"
                f" there are {load.vcpus_there:g}: they will wait for each other"
            )
        if 0 < load.memory_available < (load.memory_asked or 0):
            self.warnings.append(
                f"{node.label}: weights, KV cache and rings are {_gib(load.memory_asked or 0)}, and"
                f" {_gib(load.memory_available)} are free"
            )


def _formula(config: ServeConfig) -> str:
    t = config.topology
    dp, pp, tp = t.data_parallel_size, t.pipeline_parallel_size, t.tensor_parallel_size
    return (
        f"{t.num_api_servers} + {dp} + {dp} × {pp} × {tp} + {t.num_coordinators}"
        f" = {t.num_processes}"
    )


def _api_server(index: int) -> str:
    return f"RAYWIRE::APIServer_{index}"


def _zmq(kind: str, sockets: str, binds: str, connects: tuple[str, ...], address: str) -> Wire:
    return Wire(kind=kind, sockets=sockets, binds=binds, connects=connects, address=address)


def _ring_bytes(node: Node, segments: Sequence[Segment]) -> int:
    return sum(segment.num_bytes for segment in segments if segment.node_id == node.node_id)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
