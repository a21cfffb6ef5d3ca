"""Room on a Ray cluster: looked for, reserved, given back.

A bundle for each rank, pinned to the node that `placement` has chosen: all in one placement group,
or each in its own where a rank may have to move. Groups are not detached, so Ray gives them back
with the command, however that ends. Used by `ray_engines` for engine cores, and by `hybrid` for
whole servers.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.placement import (
    BusyError,
    Node,
    Placement,
    PlacementError,
    RankDemand,
    RankPlace,
    Strategy,
    place,
)
from cluster.ray_relocation import choose_node, explain_refusals, reachable_nodes
from cluster.ray_session import RaySession
from engine.errors import ConfigError, ServerError

logger = logging.getLogger(__name__)

NODE_LABEL = "ray.io/node-id"
"""Ray puts it on every node."""

_JOINING_S = 10.0
"""Nodes may still be joining: only then is it final that the ranks can never fit."""

_GRANT_S = 10.0
"""A reservation that was possible when we looked is granted in milliseconds. If not, somebody was
faster: look again."""

_LOOK_S = 0.5
"""How often a busy cluster is looked at."""

_GLANCE_S = 0.1
"""How soon a wait notices that the server is being closed."""


class Reservation:
    """What one server has reserved.

    Args:
        session: the cluster.
        check_open: raises when the server is being closed; asked all the time.
        name: of the placement groups, for `ray list`.
    """

    def __init__(self, session: RaySession, check_open: Callable[[], None], name: str) -> None:
        self._session = session
        self._check_open = check_open
        self._name = name
        self._places: dict[int, tuple[Any, int]] = {}
        """Of each rank: its group, and the number of its bundle there."""
        self._num_groups = 0
        self._demand = RankDemand(cpus=0)
        self._moving = threading.Lock()
        """Held from a look at the cluster until what it showed is reserved: ranks that move at the
        same time would else be given the same room."""

    def take(
        self,
        demand_on: Callable[[Sequence[Node]], RankDemand],
        num_ranks: int,
        strategy: Strategy,
        ranks_per_node: int | None,
        *,
        timeout_s: float,
        are_apart: bool = False,
    ) -> Placement:
        """Reserve a place for every rank. Blocks.

        Args:
            demand_on: what one rank needs, given the nodes.
            num_ranks: how many there are.
            strategy: how they go to nodes.
            ranks_per_node: with the strategy strict.
            timeout_s: how long a busy cluster has to make room.
            are_apart: whether a rank may `move`.

        Raises:
            ConfigError: they do not fit; it compares, node by node. Nothing stays reserved.
        """

        def decide() -> Placement:
            nodes = self._session.observe_nodes()
            self._demand = demand_on(nodes)
            return place(nodes, self._demand, num_ranks, strategy, ranks_per_node)

        return wait_for_room(
            decide,
            lambda placement, wait_s: self._reserve(placement.ranks, wait_s, are_apart),
            timeout_s=timeout_s,
            joining_s=0.0 if self._session.is_ours else _JOINING_S,
            pause=self._pause,
        )

    def move(self, place: RankPlace, refused: Mapping[str, str], *, is_local: bool) -> Node:
        """Give a rank's place up, with whatever still runs there, and reserve another: on its node,
        if that can be reached, else elsewhere. Waits as long as there is no room: nodes come back.
        For any thread.

        Args:
            place: where it was.
            refused: nodes where it cannot run, by id, and why.
            is_local: only the command's node will do.

        Raises:
            ServerError: it cannot run on any node that lives and is large enough.
        """
        with self._moving:
            self._give_back([place.rank])
        home: str | None = place.node.node_id
        is_told = False
        while True:
            rows = [row for row in self._session.ray.nodes() if row["NodeID"] not in refused]
            reachable = reachable_nodes(rows)
            try:
                with self._moving:
                    self._check_open()
                    nodes = self._session.observe_nodes()
                    if why := explain_refusals(nodes, self._demand, refused, is_local=is_local):
                        raise ServerError(why)
                    node = choose_node(
                        nodes, self._demand, home=home, reachable=reachable, is_local=is_local
                    )
                    if self._reserve([replace(place, node=node)], _GRANT_S, are_apart=True):
                        return node
                home = None  # somebody else has its room by now
            except (PlacementError, BusyError) as error:
                if not is_told:
                    logger.warning("a lost rank waits for room, however long: %s", error)
                    is_told = True
            self._pause(_LOOK_S)

    def options(self, rank: int) -> dict[str, Any]:
        """Of the actor that fills the place of this rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self._demand.cpus,
            "num_gpus": self._demand.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(*self._places[rank]),
        }

    def give_back(self) -> None:
        """All of it. Idempotent."""
        self._give_back(list(self._places))

    def _give_back(self, ranks: Sequence[int]) -> None:
        groups = [self._places.pop(rank)[0] for rank in ranks if rank in self._places]
        for group in {group.id: group for group in groups}.values():
            self._session.ray.util.remove_placement_group(group)

    def _reserve(self, places: Sequence[RankPlace], timeout_s: float, are_apart: bool) -> bool:
        """Reserve these places; False, and none of them is reserved, if Ray does not grant them in
        time."""
        ranks = [each.rank for each in places]
        try:
            deadline = time.monotonic() + timeout_s
            for together in [[each] for each in places] if are_apart else [places]:
                self._ask_for(together)
            for group, _ in [self._places[rank] for rank in ranks]:
                while not group.wait(_GLANCE_S):
                    self._check_open()
                    if time.monotonic() >= deadline:
                        self._give_back(ranks)
                        return False
        except BaseException:
            self._give_back(ranks)
            raise
        return True

    def _ask_for(self, places: Sequence[RankPlace]) -> None:
        """Ask Ray for one group of these places."""
        self._num_groups += 1  # a name may be used again only after its group is gone
        group = self._session.ray.util.placement_group(
            [bundle(self._demand)] * len(places),
            bundle_label_selector=[{NODE_LABEL: each.node.node_id} for each in places],
            name=f"{self._name}-{self._num_groups}",
        )
        self._places |= {each.rank: (group, number) for number, each in enumerate(places)}

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (rest_s := deadline - time.monotonic()) > 0:
            self._check_open()
            time.sleep(min(rest_s, _GLANCE_S))
        self._check_open()


def wait_for_room(
    decide: Callable[[], Placement],
    reserve: Callable[[Placement, float], bool],
    *,
    timeout_s: float,
    joining_s: float,
    pause: Callable[[float], None],
    clock: Callable[[], float] = time.monotonic,
) -> Placement:
    """Look at the cluster until the ranks fit, and reserve their places.

    Args:
        decide: looks and places; raises BusyError or PlacementError.
        reserve: tries for so many seconds; False if it was not granted.
        timeout_s: how long others may keep us waiting.
        joining_s: how long nodes may take to join, before too few of them is final.
        pause: between two looks; may raise to end it all.
        clock: seconds.

    Raises:
        ConfigError: they do not fit; it compares, node by node.
    """
    began = clock()
    is_told = False
    while True:
        try:
            placement = decide()
            if reserve(placement, max(0.0, min(_GRANT_S, began + timeout_s - clock()))):
                return placement
            raise BusyError("Ray does not grant the reservation, though there is room")
        except PlacementError:
            if clock() - began >= min(joining_s, timeout_s):
                raise
        except BusyError as error:
            if clock() - began >= timeout_s:
                raise ConfigError(
                    f"{error} (waited {timeout_s:g} s, see --placement-timeout)"
                ) from error
            if not is_told:
                logger.warning("waiting up to %.0f s for room: %s", timeout_s, error)
                is_told = True
        pause(_LOOK_S)


def bundle(demand: RankDemand) -> dict[str, float]:
    """What Ray reserves for one rank."""
    amounts = {"CPU": demand.cpus, "GPU": demand.gpus}
    return {name: float(amount) for name, amount in amounts.items() if amount}
