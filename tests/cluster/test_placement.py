"""Where ranks go: never too many on a node, the same every time, and refused only where nothing
fits."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import (
    BusyError,
    Node,
    Placement,
    PlacementError,
    RankDemand,
    Resources,
    Strategy,
    demand_of,
    place,
)
from engine.errors import ConfigError

ONE_CPU = RankDemand(cpus=1)


def make_node(
    name: str,
    *,
    cpus: float = 4,
    gpus: float = 0,
    free_cpus: float | None = None,
    free_gpus: float | None = None,
    is_driver: bool = False,
    is_alive: bool = True,
) -> Node:
    return Node(
        node_id=name,
        address=f"10.77.0.{ord(name[0])}",
        total=Resources(cpus=cpus, gpus=gpus),
        available=Resources(
            cpus=cpus if free_cpus is None else free_cpus,
            gpus=gpus if free_gpus is None else free_gpus,
        ),
        is_driver=is_driver,
        is_alive=is_alive,
    )


def counts(placement: Placement) -> dict[str, int]:
    return {node.node_id: len(placement.on(node)) for node in placement.nodes}


# Small enough to try out every assignment.
NODES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([0, 0.5, 1]), st.booleans()),
    min_size=1,
    max_size=4,
).map(
    lambda rows: [
        make_node(
            "abcd"[i],
            cpus=cpus,
            gpus=gpus,
            free_cpus=cpus * share,
            free_gpus=gpus * share,
            is_driver=i == len(rows) - 1,
            is_alive=is_alive,
        )
        for i, (cpus, gpus, share, is_alive) in enumerate(rows)
    ]
)
DEMANDS = st.builds(RankDemand, cpus=st.integers(0, 2), gpus=st.integers(0, 2))
HOWS = st.sampled_from(
    [("pack", None), ("spread", None), ("strict", 1), ("strict", 2), ("strict", 3)]
)
"""Strategy and ranks per node."""


def room(resources: Resources, demand: RankDemand) -> int:
    """How many ranks fit, found by trying."""
    return max(
        n
        for n in range(7)
        if n * demand.cpus <= resources.cpus and n * demand.gpus <= resources.gpus
    )


def all_assignments(
    rooms: list[int], num_ranks: int, strategy: Strategy, each: int | None
) -> list[tuple[int, ...]]:
    """Every way to put the ranks on the nodes that the strategy allows."""
    return [
        ways
        for ways in itertools.product(*(range(r + 1) for r in rooms))
        if sum(ways) == num_ranks and (strategy != "strict" or set(ways) <= {0, each})
    ]


@given(NODES, DEMANDS, st.integers(1, 6), HOWS)
def test_what_is_placed_fits_and_what_is_refused_cannot(
    nodes: list[Node], demand: RankDemand, num_ranks: int, how: tuple[Strategy, int | None]
) -> None:
    """Compared with all assignments there are: refused exactly when there is none, for good when
    there would be none in an empty cluster either; every rank once, none too many on any node."""
    strategy, each = how
    if each and num_ranks % each:
        with pytest.raises(ConfigError, match="must divide"):
            place(nodes, demand, num_ranks, strategy, each)
        return
    alive = [node for node in nodes if node.is_alive]
    ever = all_assignments([room(n.total, demand) for n in alive], num_ranks, strategy, each)
    now = all_assignments([room(n.available, demand) for n in alive], num_ranks, strategy, each)
    if not now:
        with pytest.raises(BusyError if ever else PlacementError):
            place(nodes, demand, num_ranks, strategy, each)
        return

    placement = place(nodes, demand, num_ranks, strategy, each)

    assert [p.rank for p in placement.ranks] == list(range(num_ranks))
    found = tuple(counts(placement).get(node.node_id, 0) for node in alive)
    assert found in now
    assert_neighbours(placement)
    assert_devices(placement, demand)
    match strategy:
        case "pack":
            fewest = min(sum(map(bool, ways)) for ways in now)
            assert sum(map(bool, found)) == fewest
            can_use_driver = any(
                sum(map(bool, ways)) == fewest and uses_driver(ways, alive) for ways in now
            )
            assert uses_driver(found, alive) == can_use_driver
        case "spread":
            assert max(found) == min(max(ways) for ways in now)
            assert min(found) == max(min(ways) for ways in now)
            if all(room(n.available, demand) >= -(-num_ranks // len(alive)) for n in alive):
                assert max(found) - min(found) <= 1
        case "strict":
            assert set(found) <= {0, each}


def uses_driver(ways: tuple[int, ...], nodes: list[Node]) -> bool:
    return any(count and node.is_driver for count, node in zip(ways, nodes, strict=True))


def assert_neighbours(placement: Placement) -> None:
    """Ranks of one node follow each other."""
    ids = [p.node.node_id for p in placement.ranks]
    assert len(list(itertools.groupby(ids))) == len(set(ids))
    for node in placement.nodes:
        local = placement.on(node)
        assert [p.local_rank for p in local] == list(range(len(local)))


def assert_devices(placement: Placement, demand: RankDemand) -> None:
    """Each rank has its own, and they are numbered through on each node."""
    for node in placement.nodes:
        devices = [device for p in placement.on(node) for device in p.devices]
        assert devices == list(range(demand.gpus * len(placement.on(node))))


@given(NODES, DEMANDS, st.integers(1, 6), HOWS, st.randoms(use_true_random=False))
def test_the_order_of_nodes_does_not_matter(
    nodes: list[Node],
    demand: RankDemand,
    num_ranks: int,
    how: tuple[Strategy, int | None],
    rng: random.Random,
) -> None:
    """Ray lists nodes as it likes: the placement, and the refusal, are the same."""

    def outcome(listed: list[Node]) -> object:
        try:
            return place(listed, demand, num_ranks, *how)
        except ConfigError as error:
            return type(error), str(error)

    shuffled = rng.sample(nodes, len(nodes))

    assert outcome(nodes) == outcome(shuffled) == outcome(nodes)


def test_packing_begins_with_the_commands_own_node() -> None:
    """No wire leaves the node while there is room."""
    nodes = [make_node("a"), make_node("b", is_driver=True), make_node("c")]

    assert counts(place(nodes, ONE_CPU, 4)) == {"b": 4}
    assert place(nodes, ONE_CPU, 4).is_local
    assert counts(place(nodes, ONE_CPU, 6)) == {"b": 4, "a": 2}
    assert not place(nodes, ONE_CPU, 6).is_local


def test_packing_leaves_the_commands_node_when_another_holds_all() -> None:
    """One node instead of two: the head of a Kubernetes cluster often has no CPUs for ranks."""
    nodes = [make_node("a", cpus=1, is_driver=True), make_node("b")]

    assert counts(place(nodes, ONE_CPU, 3)) == {"b": 3}


def test_spread_and_strict_use_the_commands_node_first() -> None:
    """Rank 0 is near the API servers."""
    nodes = [make_node("a"), make_node("b", is_driver=True), make_node("c")]

    assert counts(place(nodes, ONE_CPU, 4, "spread")) == {"b": 2, "a": 1, "c": 1}
    assert counts(place(nodes, ONE_CPU, 4, "strict", 2)) == {"b": 2, "a": 2}


def test_ranks_get_gpus_where_the_cluster_has_them() -> None:
    """A GPU for each worker and a CPU for the core; CPUs, one for each worker, elsewhere."""
    cpu_node, gpu_node = make_node("a"), make_node("b", gpus=8)

    assert demand_of([cpu_node], 2) == RankDemand(cpus=2)
    assert demand_of([cpu_node, gpu_node], 2) == RankDemand(gpus=2, cpus=1)
    assert demand_of([cpu_node, gpu_node], 2, device="cpu") == RankDemand(cpus=2)
    assert demand_of([cpu_node], 2, device="cuda") == RankDemand(gpus=2, cpus=1)
    dead = make_node("c", gpus=8, is_alive=False)
    assert demand_of([cpu_node, dead], 2) == RankDemand(cpus=2)
    [first, second] = place([cpu_node, gpu_node], RankDemand(gpus=2, cpus=1), 2).ranks
    assert (first.node, first.devices) == (gpu_node, (0, 1))
    assert (second.node, second.devices) == (gpu_node, (2, 3))


def test_processes_of_one_machine_share_its_cpus() -> None:
    """Without Ray nothing counts CPUs: a laptop may run more ranks than it has cores."""
    laptop = make_node("a", cpus=2, is_driver=True)

    demand = demand_of([laptop], 4, are_cpus_shared=True)

    assert counts(place([laptop], demand, 8)) == {"a": 8}


@pytest.mark.parametrize(
    ("nodes", "demand", "how", "words"),
    [
        (
            [make_node("a", is_driver=True), make_node("b", cpus=2)],
            RankDemand(cpus=2),
            (4, "pack"),
            "4 ranks of 2 CPUs each cannot be placed (pack), even if nothing else ran:"
            " a (10.77.0.97, this node) has 4 CPUs: room for 2; b (10.77.0.98) has 2 CPUs: room for"
            " 1. Add nodes, or lower --data-parallel-size to 3",
        ),
        (
            [make_node("a", gpus=4)],
            RankDemand(gpus=8, cpus=1),
            (1, "pack"),
            "1 rank of 8 GPUs and 1 CPU cannot be placed (pack), even if nothing else ran:"
            " a (10.77.0.97) has 4 GPUs and 4 CPUs: room for 0. The workers of a rank are on one"
            " node: lower --tensor-parallel-size times --pipeline-parallel-size from 8 to 4, or add"
            " larger nodes",
        ),
        ([make_node("a")], RankDemand(gpus=1, cpus=1), (1, "pack"), "or use --device cpu"),
        ([make_node("a", cpus=0, gpus=8)], RankDemand(gpus=2, cpus=1), (1, "pack"), "give those"),
        ([make_node("a", is_alive=False)], ONE_CPU, (1, "pack"), "no node is alive"),
        (
            [make_node("a", cpus=3), make_node("b", cpus=1)],
            ONE_CPU,
            (4, "strict", 2),
            "2 nodes with room for 2 would do",
        ),
    ],
)
def test_a_refusal_compares_node_by_node_and_says_what_to_change(
    nodes: list[Node], demand: RankDemand, how: tuple[int, Strategy, int], words: str
) -> None:
    """What each node has, what was asked, and the way out."""
    with pytest.raises(PlacementError) as refusal:
        place(nodes, demand, *how)

    assert words in str(refusal.value)


def test_a_busy_cluster_is_another_refusal() -> None:
    """The caller may wait for it; the message says what is held."""
    nodes = [make_node("a", gpus=8, free_gpus=2), make_node("b", gpus=8, free_gpus=0.5)]

    with pytest.raises(BusyError) as refusal:
        place(nodes, RankDemand(gpus=2, cpus=1), 3)

    assert str(refusal.value) == (
        "3 ranks of 2 GPUs and 1 CPU each do not fit now (pack):"
        " a (10.77.0.97) has 2 GPUs and 4 CPUs free of 8 GPUs and 4 CPUs: room for 1;"
        " b (10.77.0.98) has 0.5 GPUs and 4 CPUs free of 8 GPUs and 4 CPUs: room for 0."
        " End what holds the rest (`ray status` shows it), or ask for less"
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ((4, "strict"), "needs --data-parallel-size-local"),
        ((4, "strict", 3), "3 must divide --data-parallel-size 4"),
        ((4, "strict", 0), "0 must divide"),
        ((4, "pack", 2), "goes with --data-parallel-placement strict, not with pack"),
    ],
)
def test_contradictory_settings_are_refused(how: tuple[int, Strategy, int], words: str) -> None:
    """Whatever nodes there are."""
    with pytest.raises(ConfigError, match=words):
        place([make_node("a")], ONE_CPU, *how)
