"""Where a rank goes whose engine core is lost, on what is left of a Ray cluster. Used by
`ray_reservation`.

Ray takes tens of seconds to notice that a node is gone or its link is cut, and until then lists it
as alive. The command asks the node itself: it takes a TCP connection or it does not.
"""

import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.placement import Node, RankDemand, place

_REACH_TIMEOUT_S = 1.5
"""Of a node for a TCP connection. Less than `ray_lease` waits for a step."""

_MAX_PROBES = 16
"""At once."""


def choose_node(
    nodes: Iterable[Node],
    demand: RankDemand,
    *,
    home: str | None,
    reachable: Collection[str],
    is_local: bool,
) -> Node:
    """The node for one rank. Pure.

    Args:
        nodes: of the cluster, as they are now.
        demand: what the rank reserves.
        home: id of the node where it was. It stays there if that can be reached: its room is being
            given back. None: not there again.
        reachable: ids of the nodes that answer.
        is_local: the wires are ipc, so that no other node than the command's will do.

    Raises:
        PlacementError, BusyError: no node has room; they compare.
    """
    left = [
        node
        for node in nodes
        if node.is_alive and node.node_id in reachable and (node.is_driver or not is_local)
    ]
    at_home = [node for node in left if node.node_id == home]
    return at_home[0] if at_home else place(left, demand, 1).ranks[0].node


def explain_refusals(
    nodes: Iterable[Node], demand: RankDemand, refused: Mapping[str, str], *, is_local: bool
) -> str | None:
    """Why a rank will not run anywhere, if it has been refused by each node that lives and would be
    large enough. None: there is another, though perhaps without room now, or none lives. Pure.

    Args:
        nodes, demand, is_local: as in `choose_node`.
        refused: why, with the node's name, by its id.
    """
    able = [
        node
        for node in nodes
        if node.is_alive
        and (node.is_driver or not is_local)
        and demand.fits_into(node.total, most=1)
    ]
    if not able or any(node.node_id not in refused for node in able):
        return None
    reasons = "; ".join(refused[node.node_id] for node in able)
    return f"no node is left where it can run: {reasons}"


def reachable_nodes(
    rows: Sequence[Mapping[str, Any]], timeout_s: float = _REACH_TIMEOUT_S
) -> set[str]:
    """The ids of the nodes whose Ray takes connections from here.

    Args:
        rows: of `ray.nodes()`.
        timeout_s: how long one may take; all are asked at once.
    """
    alive = [row for row in rows if row["Alive"]]
    with ThreadPoolExecutor(_MAX_PROBES) as threads:
        answers = threads.map(lambda row: _answers(row, timeout_s), alive)
        return {row["NodeID"] for row, answer in zip(alive, answers, strict=True) if answer}


def _answers(row: Mapping[str, Any], timeout_s: float) -> bool:
    try:
        address = (row["NodeManagerAddress"], row["NodeManagerPort"])
        socket.create_connection(address, timeout_s).close()
    except OSError:
        return False
    return True
