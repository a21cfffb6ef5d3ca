"""The layout of hybrid balancing on a Ray cluster: a server of its own on each node. Pure.

Nodes are chosen as `hybrid` does it, which reserves for whole servers; each server is laid out as
`raywire plan` would on its node, and all together are one layout. What runs them, an actor on each
node and the command, works as little as the command of any server, and is not counted either.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain

from cluster.config import ServeConfig
from cluster.estimate import ModelFacts
from cluster.http_socket import url
from cluster.hybrid import server_title
from cluster.layout import Layout, NodeLoad, ServerPlan
from cluster.layout_builder import lay_out, place_now
from cluster.placement import Node, Placement, RankDemand, RankPlace, demand_of


def lay_out_servers(config: ServeConfig, nodes: Sequence[Node], facts: ModelFacts | None) -> Layout:
    """Lay out the servers of all nodes as they are now.

    Args:
        config: what was asked for.
        nodes: of the Ray cluster.
        facts: of the model; None where it is not on this machine yet.

    Raises:
        ConfigError: a start would be refused; one message that says why and what to do.
    """
    demand = demand_of(nodes, config.num_local_devices, device=config.engine.device)
    placement = place_now(config, nodes, demand, config.num_nodes, "strict", 1)
    layouts = [
        lay_out(
            _config_on_node(config, chosen),
            [dataclasses.replace(chosen.node, is_driver=True)],
            facts,
            is_counted_by_ray=True,
        )
        for chosen in placement.ranks
    ]
    return _merge(config, placement, demand, layouts)


def _first_rank(config: ServeConfig, chosen: RankPlace) -> int:
    return chosen.rank * config.num_local_ranks


def _config_on_node(config: ServeConfig, chosen: RankPlace) -> ServeConfig:
    """Of one server: what `hybrid.node_arguments` ask for."""
    return dataclasses.replace(
        config,
        data_parallel_backend="mp",
        data_parallel_start_rank=_first_rank(config, chosen),
        data_parallel_placement=None,
        ray_address=None,
    )


def _merge(
    config: ServeConfig, placement: Placement, demand: RankDemand, layouts: Sequence[Layout]
) -> Layout:
    of_one = layouts[0].formula.partition(" = ")[0]
    processes = tuple(chain.from_iterable(each.processes for each in layouts))
    pairs = list(zip(placement.ranks, layouts, strict=True))
    return dataclasses.replace(
        layouts[0],
        flags=_flags(config),
        backend=config.backend,
        strategy=config.strategy,
        formula=f"{len(layouts)} × ({of_one}) = {len(processes)}",
        ranks=tuple(chain.from_iterable(each.ranks for each in layouts)),
        processes=processes,
        wires=tuple(chain.from_iterable(each.wires for each in layouts)),
        segments=tuple(chain.from_iterable(each.segments for each in layouts)),
        nodes=tuple(_load(chosen, demand, layout) for chosen, layout in pairs),
        min_vcpus=sum(each.min_vcpus for each in layouts),
        warnings=tuple(chain.from_iterable(each.warnings for each in layouts)),
        servers=tuple(_server(config, chosen) for chosen in placement.ranks),
    )


def _flags(config: ServeConfig) -> str:
    whole = dataclasses.replace(
        config.topology, data_parallel_size=config.engine.data_parallel_size
    )
    local = f"--data-parallel-size-local {config.num_local_ranks}"
    return f"{whole.flags} {local} --data-parallel-hybrid-lb".strip()


def _load(chosen: RankPlace, demand: RankDemand, layout: Layout) -> NodeLoad:
    """With what Ray takes off its count for the whole server."""
    [load] = layout.nodes
    return dataclasses.replace(
        load,
        is_driver=chosen.node.is_driver,
        reserved_cpus=demand.cpus,
        reserved_gpus=demand.gpus,
    )


def _server(config: ServeConfig, chosen: RankPlace) -> ServerPlan:
    first_rank = _first_rank(config, chosen)
    return ServerPlan(
        title=f"ray::{server_title(first_rank)}",
        node_id=chosen.node.node_id,
        first_rank=first_rank,
        num_ranks=config.num_local_ranks,
        url=url(config.host, config.port, chosen.node.address),
    )
