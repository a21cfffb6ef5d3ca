"""A layout as text for people. Pure; used by `raywire plan MODEL`."""

from collections import Counter
from collections.abc import Iterable, Sequence

from cluster.layout import Layout, NodeLoad, RankPlan, Segment, ServerPlan, Wire
from cluster.text_table import aligned

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def render(layout: Layout) -> str:
    """All of it, in some dozen lines: what is alike is counted, `--json` lists it."""
    sections = [
        _head(layout),
        _servers(layout.servers),
        ["ranks", *_indented(_ranks(layout.ranks))],
        ["processes", *_indented(_processes(layout))],
        ["wires", *_indented(_wires(layout.wires))],
        ["shared memory", *_indented(_segments(layout.segments))],
        ["nodes", *_indented(_nodes(layout.nodes))],
        [f"warning: {warning}" for warning in layout.warnings],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(layout: Layout) -> list[str]:
    flags = f" {layout.flags}" if layout.flags else ""
    dtype = f", {layout.dtype}" if layout.dtype else ""
    return [
        f"{layout.model}{flags}{dtype}: {layout.strategy}, backend {layout.backend}",
        f"{layout.formula} processes, {layout.min_vcpus} vCPUs",
    ]


def _servers(servers: Sequence[ServerPlan]) -> list[str]:
    if not servers:
        return []
    rows = [("actor", "node", "ranks", "endpoint")]
    for server in servers:
        last_rank = server.first_rank + server.num_ranks - 1
        ranks = f"{server.first_rank}-{last_rank}" if server.num_ranks > 1 else f"{last_rank}"
        rows.append((server.title, server.node_id[:8], ranks, server.url))
    return ["servers", *_indented(aligned(rows, left=(0, 1, 2, 3)))]


def _ranks(ranks: Sequence[RankPlan]) -> list[str]:
    head = ("rank", "node", "address", "devices", "weights", "KV cache", "KV/token", "tokens")
    rows: list[tuple[str, ...]] = [(*head, "longest")]
    for rank in ranks:
        rows.append((str(rank.rank), rank.node_id[:8], rank.address, _devices(rank), *_need(rank)))
    lines = aligned(rows, left=(0, 1, 2, 3))
    if any(rank.need is None for rank in ranks):
        lines.append("what it needs is unknown before the model is on this machine")
    else:
        lines.append("weights and KV are each worker's; torch takes some hundred MiB more")
    return lines


def _devices(rank: RankPlan) -> str:
    if not rank.devices:
        return "CPU"
    first, last = rank.devices[0], rank.devices[-1]
    return f"GPU {first}" if first == last else f"GPU {first}-{last}"


def _need(rank: RankPlan) -> tuple[str, ...]:
    if (need := rank.need) is None:
        return ("?",) * 5
    cache = "90% of free" if need.kv_cache_bytes is None else size(need.kv_cache_bytes)
    return (
        size(need.weight_bytes),
        cache,
        size(need.kv_bytes_per_token),
        "?" if need.kv_tokens is None else str(need.kv_tokens),
        "?" if need.max_model_len is None else str(need.max_model_len),
    )


def _processes(layout: Layout) -> list[str]:
    return aligned([(p.title, p.node_id[:8]) for p in layout.processes], left=(0, 1))


def _wires(wires: Sequence[Wire]) -> list[str]:
    """One line for each kind: how many, who binds, who connects, where."""
    rows = [("kind", "sockets", "number", "binds", "connects", "address")]
    for kind in dict.fromkeys(wire.kind for wire in wires):
        alike = [wire for wire in wires if wire.kind == kind]
        rows.append(
            (
                kind,
                alike[0].sockets,
                str(len(alike)),
                _span(wire.binds for wire in alike),
                _span(name for wire in alike for name in wire.connects),
                alike[0].address,
            )
        )
    return aligned(rows, left=(0, 1, 3, 4, 5))


def _span(names: Iterable[str]) -> str:
    """`RAYWIRE::APIServer_0 … 3`, for one kind of process after the other."""
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        stem = name.partition("_")[0]
        kinds.setdefault(stem, []).append(name)
    return ", ".join(
        each[0] if len(each) == 1 else f"{each[0]} … {each[-1].partition('_')[2]}"
        for each in kinds.values()
    )


def _segments(segments: Sequence[Segment]) -> list[str]:
    rows = [("ring", "number", "node", "chunks", "chunk", "readers", "bytes each")]
    alike = Counter(
        (s.kind, s.node_id, s.num_chunks, s.chunk_bytes, len(s.readers), s.num_bytes)
        for s in segments
    )
    for (kind, node_id, chunks, chunk_bytes, readers, num_bytes), number in alike.items():
        rows.append(
            (
                kind,
                str(number),
                node_id[:8],
                str(chunks),
                size(chunk_bytes),
                str(readers),
                str(num_bytes),
            )
        )
    return aligned(rows, left=(0, 2))


def _nodes(nodes: Sequence[NodeLoad]) -> list[str]:
    head = ("node", "address", "ranks", "processes", "vCPUs asked", "there", "reserved")
    rows = [(*head, "GPUs there", "memory asked", "free")]
    for node in nodes:
        rows.append(
            (
                node.node_id[:8],
                f"{node.address}{', this node' if node.is_driver else ''}",
                str(node.num_ranks),
                str(node.num_processes),
                str(node.vcpus_asked),
                f"{node.vcpus_there:g}",
                _reserved(node),
                f"{node.gpus_there:g}",
                "?" if node.memory_asked is None else size(node.memory_asked),
                size(node.memory_available) if node.memory_available else "?",
            )
        )
    return aligned(rows, left=(0, 1))


def _reserved(node: NodeLoad) -> str:
    parts = [
        f"{number} {what}"
        for number, what in ((node.reserved_gpus, "GPU"), (node.reserved_cpus, "CPU"))
        if number
    ]
    return " + ".join(parts) or "none"


def size(num_bytes: int) -> str:
    """`1.5 GiB`."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
