"""Where each data-parallel rank runs. Pure: nodes and a demand in, ranks to nodes out; used by the
launch and by the dry run (`layout`), so that what the one shows is what the other does.

    pack      fewest nodes, this one among them if that costs no more    4 + 2 + 0
    spread    as even as the nodes' room allows                          2 + 2 + 2
    strict    exactly k ranks on each node that is used (k = 3)          3 + 3 + 0

A rank with all of its workers is on one node: they share memory. Ranks that follow each other are
neighbours. Two ways to fail, so that the caller knows whether to wait: `PlacementError` says that
the ranks would not fit even if the cluster were empty, `BusyError` that they do not fit now.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from engine.errors import ConfigError

Strategy = Literal["pack", "spread", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a node has. Ray counts in fractions, so GPUs and CPUs may be broken numbers."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0
    """0: not known. No rank is placed by it; the dry run compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster, as it was when somebody looked."""

    node_id: str
    """Ray's; addresses may be shared, or be others than the user thinks."""

    address: str
    total: Resources
    available: Resources
    """What nobody has reserved."""

    is_driver: bool = False
    """Whether the command, with its API servers, runs there."""

    is_alive: bool = True

    @property
    def label(self) -> str:
        here = ", this node" if self.is_driver else ""
        return f"{self.node_id[:8]} ({self.address}{here})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDemand:
    """What one rank reserves on its node: for its engine core and all of its workers."""

    cpus: int
    gpus: int = 0

    def fits_into(self, resources: Resources, most: int) -> int:
        """How many ranks find room, of `most` that there are."""
        rooms = [
            int(there // asked)
            for asked, there in ((self.cpus, resources.cpus), (self.gpus, resources.gpus))
            if asked
        ]
        return max(0, min([most, *rooms]))

    def __str__(self) -> str:
        return " and ".join(
            _counted(number, what)
            for number, what in ((self.gpus, "GPU"), (self.cpus, "CPU"))
            if number
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    node: Node
    local_rank: int
    """Its number among the ranks on that node."""

    devices: tuple[int, ...]
    """Its GPUs, numbered from 0 among those that this server takes on the node: which they are is
    Ray's choice. Empty: it computes on CPUs."""


@dataclass(frozen=True, slots=True)
class Placement:
    ranks: tuple[RankPlace, ...]
    """By data-parallel rank."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those that are used, in the order of their ranks."""
        return tuple({place.node.node_id: place.node for place in self.ranks}.values())

    @property
    def is_local(self) -> bool:
        """Whether all ranks are where the command is: then no wire leaves the node."""
        return all(place.node.is_driver for place in self.ranks)

    def moved(self, rank: int, node: Node) -> "Placement":
        """The same with one rank on that node."""
        return Placement(
            tuple(replace(each, node=node) if each.rank == rank else each for each in self.ranks)
        )

    def on(self, node: Node) -> tuple[RankPlace, ...]:
        return tuple(place for place in self.ranks if place.node.node_id == node.node_id)


class PlacementError(ConfigError):
    """The ranks do not fit, however long one waits. The message compares, node by node."""


class BusyError(ConfigError):
    """The ranks do not fit now, but would if nobody else had reserved anything."""


def demand_of(
    nodes: Iterable[Node],
    num_workers: int,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    are_cpus_shared: bool = False,
) -> RankDemand:
    """What a rank with so many workers reserves: a GPU for each worker where the cluster has any,
    and one CPU for the engine core; a CPU for each worker elsewhere.

    Args:
        nodes: of the cluster.
        num_workers: tensor times pipeline parallel size.
        device: as the user chose.
        are_cpus_shared: CPUs are not counted: processes of one machine share them, without Ray.
    """
    has_gpus = any(node.is_alive and node.total.gpus > 0 for node in nodes)
    if device == "cuda" or (device == "auto" and has_gpus):
        return RankDemand(gpus=num_workers, cpus=0 if are_cpus_shared else 1)
    return RankDemand(cpus=0 if are_cpus_shared else num_workers)


def place(
    nodes: Iterable[Node],
    demand: RankDemand,
    num_ranks: int,
    strategy: Strategy = "pack",
    ranks_per_node: int | None = None,
) -> Placement:
    """Decide where every rank runs. The same for the same nodes, in whatever order they come.

    Args:
        nodes: of the cluster; dead ones are left out.
        demand: what each rank reserves.
        num_ranks: data-parallel size.
        strategy: see above.
        ranks_per_node: k of `strict`, and None for the others.

    Raises:
        PlacementError: they can never fit.
        BusyError: they would, but for what others hold.
        ConfigError: strategy and `ranks_per_node` contradict each other.
    """
    check_strategy(num_ranks, strategy, ranks_per_node)
    alive = sorted((node for node in nodes if node.is_alive), key=_order)
    task = _Task(demand, num_ranks, strategy, ranks_per_node or 1)
    if task.assign([node.total for node in alive]) is None:
        raise PlacementError(task.explain(alive))
    counts = task.assign([node.available for node in alive])
    if counts is None:
        raise BusyError(task.explain_busy(alive))
    return _number(alive, counts, demand.gpus)


def check_strategy(num_ranks: int, strategy: Strategy, ranks_per_node: int | None) -> None:
    """Raise ConfigError if these do not go together."""
    if strategy != "strict":
        if ranks_per_node is not None:
            raise ConfigError(
                f"--data-parallel-size-local {ranks_per_node} goes with --data-parallel-placement"
                f" strict, not with {strategy}"
            )
    elif ranks_per_node is None:
        raise ConfigError(
            "--data-parallel-placement strict needs --data-parallel-size-local: how many ranks each"
            " node gets"
        )
    elif ranks_per_node < 1 or num_ranks % ranks_per_node:
        raise ConfigError(
            f"--data-parallel-size-local {ranks_per_node} must divide --data-parallel-size"
            f" {num_ranks}: every node that is used gets as many ranks"
        )


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be placed."""

    demand: RankDemand
    num_ranks: int
    strategy: Strategy
    ranks_per_node: int

    def assign(self, offers: Sequence[Resources]) -> dict[int, int] | None:
        """Ranks on each node by its place in `offers`, in the order of ranks; None: no room."""
        rooms = self._rooms(offers)
        match self.strategy:
            case "pack":
                return _pack(rooms, self.num_ranks)
            case "spread":
                return _spread(rooms, self.num_ranks)
            case "strict":
                return _strict(rooms, self.num_ranks, self.ranks_per_node)
            case _:
                assert_never(self.strategy)

    def explain(self, nodes: Sequence[Node]) -> str:
        offers = [node.total for node in nodes]
        lines = [
            f"{node.label} has {_amount(node.total, self.demand)}: room for {room}"
            for node, room in zip(nodes, self._rooms(offers), strict=True)
        ]
        return (
            f"{self._asked} cannot be placed ({self._how}), even if nothing else ran:"
            f" {'; '.join(lines) or 'no node is alive'}. {self._remedy(offers)}"
        )

    def explain_busy(self, nodes: Sequence[Node]) -> str:
        rooms = self._rooms([node.available for node in nodes])
        lines = [
            f"{node.label} has {_amount(node.available, self.demand)} free of"
            f" {_amount(node.total, self.demand)}: room for {room}"
            for node, room in zip(nodes, rooms, strict=True)
        ]
        return (
            f"{self._asked} do not fit now ({self._how}): {'; '.join(lines)}. End what holds the"
            " rest (`ray status` shows it), or ask for less"
        )

    def _rooms(self, offers: Sequence[Resources]) -> list[int]:
        return [self.demand.fits_into(offer, self.num_ranks) for offer in offers]

    @property
    def _asked(self) -> str:
        each = f" of {self.demand}{' each' if self.num_ranks > 1 else ''}"
        return _counted(self.num_ranks, "rank") + (each if str(self.demand) else "")

    @property
    def _how(self) -> str:
        is_strict = self.strategy == "strict"
        return f"strict, {self.ranks_per_node} a node" if is_strict else self.strategy

    def _remedy(self, offers: Sequence[Resources]) -> str:
        """What to change."""
        rooms = self._rooms(offers)
        if not offers:
            return "Start the cluster's nodes"
        if not any(rooms):
            return self._remedy_of_size(offers)
        if self.strategy == "strict" and sum(rooms) >= self.num_ranks:
            return (
                f"{_counted(self.num_ranks // self.ranks_per_node, 'node')} with room for"
                f" {self.ranks_per_node} would do: change --data-parallel-size-local, or use"
                " --data-parallel-placement pack"
            )
        return f"Add nodes, or lower --data-parallel-size to {sum(rooms)}"

    def _remedy_of_size(self, offers: Sequence[Resources]) -> str:
        """What to change where not even one rank fits on any node."""
        most = max(int(offer.gpus if self.demand.gpus else offer.cpus) for offer in offers)
        what = "GPU" if self.demand.gpus else "CPU"
        asked = self.demand.gpus or self.demand.cpus
        if most >= asked:  # so it is the engine core's CPU
            return "A rank needs its GPUs and a CPU on one node: give those nodes CPUs"
        if most == 0:
            way_out = ", or use --device cpu" if self.demand.gpus else ""
            return f"No node has a {what}: add some{way_out}"
        return (
            "The workers of a rank are on one node: lower --tensor-parallel-size times"
            f" --pipeline-parallel-size from {asked} to {most}, or add larger nodes"
        )


def _pack(rooms: Sequence[int], num_ranks: int) -> dict[int, int] | None:
    """The fewest nodes. Number 0, the command's own if it is in the cluster, is one of them unless
    that costs one more."""
    if sum(rooms) < num_ranks:
        return None
    largest = sorted((i for i, room in enumerate(rooms) if room), key=lambda i: (-rooms[i], i))
    fewest = next(
        n for n in range(1, len(largest) + 1) if sum(rooms[i] for i in largest[:n]) >= num_ranks
    )
    first = [0, *(i for i in largest if i != 0)][:fewest]
    chosen = first if sum(rooms[i] for i in first) >= num_ranks else largest[:fewest]
    counts, left = {}, num_ranks
    for i in chosen:
        counts[i] = min(left, rooms[i])
        left -= counts[i]
    return counts


def _spread(rooms: Sequence[int], num_ranks: int) -> dict[int, int] | None:
    if sum(rooms) < num_ranks:
        return None
    counts = dict.fromkeys(range(len(rooms)), 0)
    for _ in range(num_ranks):
        counts[min((i for i in counts if counts[i] < rooms[i]), key=lambda i: (counts[i], i))] += 1
    return {i: count for i, count in counts.items() if count}


def _strict(rooms: Sequence[int], num_ranks: int, each: int) -> dict[int, int] | None:
    wanted = num_ranks // each
    able = [i for i, room in enumerate(rooms) if room >= each][:wanted]
    return dict.fromkeys(able, each) if len(able) == wanted else None


def _number(nodes: Sequence[Node], counts: Mapping[int, int], num_devices: int) -> Placement:
    """Ranks and devices in order, node by node."""
    places = [(nodes[i], local_rank) for i, count in counts.items() for local_rank in range(count)]
    return Placement(
        tuple(
            RankPlace(
                rank=rank,
                node=node,
                local_rank=local_rank,
                devices=tuple(range(local_rank * num_devices, (local_rank + 1) * num_devices)),
            )
            for rank, (node, local_rank) in enumerate(places)
        )
    )


def _order(node: Node) -> tuple[object, ...]:
    """The command's node first, then by address as people count."""
    try:
        address = ipaddress.ip_address(node.address)
        key: tuple[object, ...] = (0, address.version, int(address))
    except ValueError:
        key = (1, node.address)
    return (not node.is_driver, *key, node.node_id)


def _amount(resources: Resources, demand: RankDemand) -> str:
    """The resources that matter to the demand."""
    amounts = [_counted(resources.gpus, "GPU")] if demand.gpus else []
    if demand.cpus:
        amounts.append(_counted(resources.cpus, "CPU"))
    return " and ".join(amounts)


def _counted(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"
