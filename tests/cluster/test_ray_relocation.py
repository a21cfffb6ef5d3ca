"""Where a rank goes whose engine core is lost. The real thing is in tests/faults."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from cluster.placement import BusyError, Node, PlacementError, RankDemand, RankPlace, Resources
from cluster.ray_relocation import choose_node, explain_refusals, reachable_nodes
from cluster.ray_reservation import NODE_LABEL, Reservation
from engine.errors import ServerError

FULL, ROOMY = Resources(cpus=0), Resources(cpus=4)
RANK = RankDemand(cpus=2)


def node(name: str, available: Resources = ROOMY, **fields: Any) -> Node:
    address = f"10.0.0.{ord(name[0])}"
    return Node(node_id=name, address=address, total=ROOMY, available=available, **fields)


HERE = node("a", is_driver=True)


def choose(nodes: Sequence[Node], home: str | None = "b", **how: Any) -> str:
    how = {"reachable": {each.node_id for each in nodes}, "is_local": False, **how}
    return choose_node(nodes, RANK, home=home, **how).node_id


# ---------------------------------------------------------------------------------- which node


def test_a_rank_stays_on_its_node() -> None:
    """Its own room is being given back, so that none is free there yet does not matter."""
    assert choose([HERE, node("b", FULL), node("c")]) == "b"


@pytest.mark.row("F-13", "F-15")
def test_a_node_that_is_gone_or_cut_off_is_left() -> None:
    """Whether Ray knows of it or not."""
    dead = node("b", is_alive=False)
    busy = replace(HERE, available=FULL)

    assert choose([busy, dead, node("c")]) == "c"
    assert choose([busy, node("b"), node("c")], reachable={"a", "c"}) == "c"
    assert choose([HERE, node("b"), node("c")], reachable={"a", "c"}) == "a"


def test_wires_that_are_files_do_not_leave_the_commands_node() -> None:
    """Nobody elsewhere could connect."""
    with pytest.raises(BusyError):
        choose([replace(HERE, available=FULL), node("c")], home=None, is_local=True)
    assert choose([HERE, node("c")], home="a", is_local=True) == "a"


def test_too_little_room_is_told_node_by_node() -> None:
    """Now, or for good: a node may come back, or somebody end."""
    with pytest.raises(BusyError, match=r"0 CPUs free of 4 CPUs"):
        choose([node("c", FULL)])
    with pytest.raises(PlacementError, match="no node is alive"):
        choose([node("b")], reachable=set())


def test_a_rank_that_every_node_refuses_will_not_run() -> None:
    """A node that is full, or may be cut off, could still take it; one that is gone, too small or
    out of reach of the wires could not."""
    refused = {"a": "on node a: no model", "b": "on node b: no device"}
    both = [HERE, node("b")]

    def explain(*others: Node, is_local: bool = False) -> str | None:
        return explain_refusals([*both, *others], RANK, refused, is_local=is_local)

    assert explain(node("c", FULL)) is None
    reasons = "no node is left where it can run: on node a: no model; on node b: no device"
    assert explain(node("c", is_alive=False)) == reasons
    assert explain(replace(node("c"), total=Resources(cpus=1))) == reasons
    only_here = explain(node("c"), is_local=True)
    assert only_here is not None
    assert "node b" not in only_here
    assert explain_refusals([], RANK, refused, is_local=False) is None, "nodes come back"


def test_a_node_is_asked_itself_whether_it_is_there() -> None:
    """One that listens answers; one that has ended, or whose link is cut, does not, and costs no
    more than the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as up:
        rows = [row("up", up.getsockname()[1]), row("down", 1), row("dead", 1, is_alive=False)]
        rows.append(row("cut", 9, address="192.0.2.1"))

        assert reachable_nodes(rows, timeout_s=0.2) == {"up"}


def row(
    name: str, port: int, *, address: str = "127.0.0.1", is_alive: bool = True
) -> dict[str, Any]:
    return {
        "NodeID": name,
        "NodeManagerAddress": address,
        "NodeManagerPort": port,
        "Alive": is_alive,
    }


# ------------------------------------------------------------------------------ reserving there


class Group:
    """A placement group of `Cluster`."""

    def __init__(self, cluster: "Cluster", nodes: list[str]) -> None:
        self.id = object()
        self.nodes = nodes
        self._cluster = cluster

    def wait(self, _: float) -> bool:
        return not set(self.nodes) & self._cluster.full


class Cluster:
    """Ray and its session, as far as a reservation sees them."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes_there = list(nodes)
        self.full: set[str] = set()
        self.groups: list[Group] = []
        self.names: set[str] = set()
        self.ray: Any = self
        self.util: Any = self
        self.is_ours = True
        self._listener = socket.create_server(("127.0.0.1", 0))

    def nodes(self) -> list[dict[str, Any]]:
        port = self._listener.getsockname()[1]
        return [row(each.node_id, port, is_alive=each.is_alive) for each in self.nodes_there]

    def observe_nodes(self) -> list[Node]:
        return self.nodes_there

    def placement_group(
        self, bundles: object, bundle_label_selector: list[dict[str, str]], name: str
    ) -> Group:
        assert name not in self.names, "Ray refuses a name that it knows"
        self.names.add(name)
        self.groups.append(Group(self, [each[NODE_LABEL] for each in bundle_label_selector]))
        return self.groups[-1]

    def remove_placement_group(self, group: Group) -> None:
        self.groups.remove(group)

    def reserved(self) -> list[list[str]]:
        return [group.nodes for group in self.groups]

    def close(self) -> None:
        self._listener.close()


def reserve(
    cluster: Cluster, check_open: Callable[[], None], *, are_apart: bool
) -> tuple[Reservation, tuple[RankPlace, ...]]:
    """Two ranks, on one node each."""
    room = Reservation(cluster, check_open, "test")  # type: ignore[arg-type]
    how: dict[str, Any] = {"timeout_s": 1.0, "are_apart": are_apart}
    return room, room.take(lambda _: RANK, 2, "strict", 1, **how).ranks


def test_a_rank_that_moves_leaves_the_others_where_they_are() -> None:
    """Its place is given back, and the new one with the rest at the end."""
    cluster = Cluster(HERE, node("b"), node("c"))
    room, places = reserve(cluster, lambda: None, are_apart=True)
    assert cluster.reserved() == [["a"], ["b"]]

    cluster.nodes_there[1] = node("b", is_alive=False)
    assert room.move(places[1], {}, is_local=False).node_id == "a"
    assert cluster.reserved() == [["a"], ["a"]]
    assert room.move(places[0], {"a": "no"}, is_local=False).node_id == "c"
    assert cluster.reserved() == [["a"], ["c"]]

    room.give_back()
    assert cluster.reserved() == []
    cluster.close()


def test_a_rank_that_every_node_refuses_is_not_waited_for() -> None:
    """The failure counts, with what the nodes have said; the rank has no place until the next."""
    cluster = Cluster(HERE, node("b"))
    room, places = reserve(cluster, lambda: None, are_apart=True)
    refused = {"a": "on node a: no model", "b": "on node b: no model"}

    for _ in range(2):
        with pytest.raises(ServerError, match="can run: on node a: no model; on node b: no model"):
            room.move(places[1], refused, is_local=False)
    assert cluster.reserved() == [["a"]]
    cluster.close()


def test_two_ranks_that_move_at_once_do_not_get_the_same_room() -> None:
    """Who has looked reserves before another looks."""

    class SlowCluster(Cluster):
        """Whoever looks gives others the time to look as well."""

        barrier = threading.Barrier(2)

        def observe_nodes(self) -> list[Node]:
            taken = {name for names in self.reserved() for name in names}
            seen = [
                replace(each, available=FULL) if each.node_id in taken else each
                for each in self.nodes_there
            ]
            with contextlib.suppress(threading.BrokenBarrierError):
                self.barrier.wait(0.5)
            return seen

    cluster = SlowCluster(HERE, node("b"))
    room, places = reserve(cluster, lambda: None, are_apart=True)
    cluster.nodes_there = [node("c"), node("d"), node("e", FULL)]
    cluster.barrier.reset()
    with ThreadPoolExecutor(2) as threads:
        moved = threads.map(lambda place: room.move(place, {}, is_local=False).node_id, places)
        assert sorted(moved) == ["c", "d"]
    cluster.close()


def test_ranks_that_stay_together_are_reserved_together() -> None:
    """All of them or none, by Ray's own doing."""
    cluster = Cluster(HERE, node("b"))
    room, _ = reserve(cluster, lambda: None, are_apart=False)

    assert cluster.reserved() == [["a", "b"]]
    room.give_back()
    room.give_back()
    assert cluster.reserved() == []
    cluster.close()


@pytest.mark.row("F-13", "F-20")
def test_a_lost_rank_waits_for_room_until_the_server_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so once, with the comparison; nothing stays reserved for it."""
    closed = threading.Event()

    def check_open() -> None:
        if closed.is_set():
            raise ServerError("stopped")

    cluster = Cluster(HERE, node("b"))
    room, places = reserve(cluster, check_open, are_apart=True)
    cluster.nodes_there = [replace(HERE, available=FULL)]
    timer = threading.Timer(1.2, closed.set)
    timer.start()
    with pytest.raises(ServerError, match="stopped"):
        room.move(places[1], {}, is_local=False)
    timer.join()

    [warning] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "waits for room" in warning
    assert "0 CPUs free of 4 CPUs" in warning
    assert cluster.reserved() == [["a"]]
    cluster.close()
