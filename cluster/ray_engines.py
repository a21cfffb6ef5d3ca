"""Engine cores as actors on the nodes of a Ray cluster: the back end `ray`.

Implements `engine_group.EngineGroup`. Ray finds nodes, reserves what the ranks need, starts the
actors and tells of their deaths. No request and no token passes through it: once the cores run, the
only call under way is one that waits for their ends.

    placement group    one bundle per rank (`ray_reservation`)
    EngineCore_DP<r>   one actor per bundle (`actors`)
    DPCoordinator      an actor on this node, outside the group: it asks for nothing

Actors and group are not detached, so Ray ends them with the command, however that ends.
"""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cluster.actors import (
    CoordinatorActor,
    CoordinatorStart,
    End,
    EngineActor,
    EngineStart,
    Site,
    make_actor_class,
    variables_for_nodes,
)
from cluster.addresses import WireBinder
from cluster.command_watch import identify
from cluster.config import ResolvedModel, ServeConfig
from cluster.deadline import Deadline
from cluster.engine_group import Reach
from cluster.model_on_node import make_portable
from cluster.placement import Placement, RankPlace, demand_of
from cluster.ray_actors import GLANCE_S, KILL_S, RUNTIME_ENV, Actor, answers, end_of
from cluster.ray_lease import RayLease
from engine.config import CoordinatorAddresses, EngineConfig, WireConfig
from engine.errors import EXIT_CONFIG
from engine.lifecycle import describe_exit

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""How long a core's message that says why it ends may take after its end."""

_EPOCH = 0
"""Of all: none is replaced so far."""

_END_S = 12.0
"""How long it may take with everything, beside the patience that actors are due."""


class RayEngines:
    """The engine cores of one server on a Ray cluster.

    Args:
        config: what was asked for.
        on_death, has_said_why, last_seen: see `engine_group.EngineGroup`.
    """

    def __init__(
        self,
        config: ServeConfig,
        on_death: Callable[[int | None, int, str], None],
        has_said_why: Callable[[int | None, int], bool],
        last_seen: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._config = config
        self._on_death = on_death
        self._has_said_why = has_said_why
        self._last_seen = last_seen
        self._lease = RayLease("engine cores")
        self._placement: Placement | None = None
        self._engines: list[Actor] = []
        self._coordinator: Actor | None = None
        self._watcher: threading.Thread | None = None

    # ----------------------------------------------------------------------------------- placing

    def place(self, model: ResolvedModel) -> Reach:
        config = self._config
        with self._lease.step():
            num_cpus = len(config.ranks) * config.engine.world_size
            room = self._lease.connect(config.ray_address, num_cpus=num_cpus)
            placement = self._placement = room.take(
                lambda nodes: demand_of(
                    nodes, config.engine.world_size, device=config.engine.device
                ),
                len(config.ranks),
                config.strategy,
                config.data_parallel_size_local,
                timeout_s=config.placement_timeout,
            )
            session = self._lease.session
            # A cluster of our own has the loopback device's, where nobody else reaches us.
            reach = Reach(host=self._host, address=None if session.is_ours else session.address)
        for chosen in placement.ranks:
            logger.info("placed rank=%d node=%s", self._rank(chosen), chosen.node.label)
        return reach

    def _rank(self, chosen: RankPlace) -> int:
        """Placement counts the ranks of this server; others may have lower ones."""
        return self._config.ranks[chosen.rank]

    @property
    def _host(self) -> str | None:
        """Where wires are bound; None: nothing leaves this node."""
        assert self._placement is not None
        return None if self._placement.is_local else self._lease.session.address

    # ---------------------------------------------------------------------------------- starting

    def start_coordinator(
        self, binder: WireBinder, api_server_keys: Sequence[bytes], deadline: Deadline
    ) -> CoordinatorAddresses | None:
        if not self._config.topology.num_coordinators:
            return None
        with self._lease.step():
            start = CoordinatorStart(
                # Listening sockets cannot travel to an actor: over TCP it binds its own.
                wires=binder.coordinator() if self._host is None else None,
                host=self._host,
                port_range=self._config.wire_port_range,
                num_engines=self._config.topology.num_engines,
                log_level=self._config.log_level,
                command=identify(os.getpid()),
            )
            actor = self._coordinator = self._make_coordinator(start)
            calls = [
                actor.handle.bind.remote(list(api_server_keys)),
                actor.handle.describe.remote(),
            ]
            addresses, site = self._answers([actor, actor], calls, deadline)
            actor.pid = site.pid
            actor.run = actor.handle.run.remote()
            logger.info("started %s", actor)
            assert isinstance(addresses, CoordinatorAddresses)
            return addresses

    def _make_coordinator(self, start: CoordinatorStart) -> Actor:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        session = self._lease.session
        title = "DPCoordinator"
        options = {
            "num_cpus": 0,
            "runtime_env": RUNTIME_ENV,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(session.node_id, soft=False),
        }
        made = make_actor_class(session.ray, CoordinatorActor, title)
        handle = made.options(**options).remote(start)
        return Actor(kind="coordinator", title=title, node=str(session), handle=handle)

    def start(
        self,
        model: ResolvedModel,
        wire: WireConfig,
        allow: Callable[[Sequence[bytes]], None],
        deadline: Deadline,
    ) -> None:
        assert self._placement is not None
        with self._lease.step():
            starts = self._engine_starts(model, wire)
            for chosen, start in zip(self._placement.ranks, starts, strict=True):
                self._engines.append(self._make_engine(chosen, start))
            calls = [actor.handle.describe.remote() for actor in self._engines]
            sites = self._answers(self._engines, calls, deadline)
            for actor, site in zip(self._engines, sites, strict=True):
                actor.pid = site.pid
            self._allow(wire, sites, allow, deadline)
            for actor in self._engines:
                # A duration: the clocks of two nodes have nothing in common.
                actor.run = actor.handle.run.remote(deadline.left_s)
                logger.info("started %s", actor)

    def _engine_starts(self, model: ResolvedModel, wire: WireConfig) -> list[EngineStart]:
        config = self._config
        assert self._placement is not None
        configs = config.engine.engine_configs(
            model, wire, config.environment, config.log_level, config.ranks
        )
        if config.environment.worker_multiproc_method == "fork":
            logger.warning(
                "workers of a Ray actor are spawned: forks would not survive its threads"
            )
        portable, command = make_portable(model.name), identify(os.getpid())
        variables = variables_for_nodes(os.environ, is_ray_job=config.environment.is_ray_job)
        return [
            EngineStart(
                config=_on_node(configs[chosen.rank], len(self._placement.on(chosen.node))),
                model=None if chosen.node.is_driver else portable,
                node=chosen.node.label,
                command=command if chosen.node.is_driver else None,
                variables=variables,
            )
            for chosen in self._placement.ranks
        ]

    def _make_engine(self, chosen: RankPlace, start: EngineStart) -> Actor:
        title = f"EngineCore_DP{self._rank(chosen)}"
        options = {**self._lease.room.options(chosen.rank), "runtime_env": RUNTIME_ENV}
        made = make_actor_class(self._lease.ray, EngineActor, title)
        handle = made.options(**options).remote(start)
        return Actor(
            kind="engine core", title=title, node=start.node, handle=handle, index=chosen.rank
        )

    def _allow(
        self,
        wire: WireConfig,
        sites: Sequence[Site],
        allow: Callable[[Sequence[bytes]], None],
        deadline: Deadline,
    ) -> None:
        """Let everybody know the keys of everybody who will connect."""
        if wire.curve is None:
            return
        keys = [site.public_key for site in sites if site.public_key is not None]
        allow(keys)
        if self._coordinator is not None:
            call = self._coordinator.handle.allow.remote(keys)
            self._answers([self._coordinator], [call], deadline)

    def _answers(
        self, actors: Sequence[Actor], calls: Sequence[Any], deadline: Deadline
    ) -> list[Any]:
        return answers(self._lease.ray, actors, calls, deadline, self._lease.check_open)

    # ---------------------------------------------------------------------------------- watching

    def watch(self) -> None:
        self._watcher = threading.Thread(
            target=self._watch, args=(self._lease.ray,), name="ray-watch", daemon=True
        )
        self._watcher.start()

    def _watch(self, ray: Any) -> None:
        pending = {actor.run: actor for actor in self._actors() if actor.run is not None}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1)  # no timeout: asleep until then
            for call in done:
                self._report(pending.pop(call), end_of(ray, call))

    def _report(self, actor: Actor, end: End) -> None:
        actor.end = end
        if self._lease.is_closed:
            return
        if end.exit_code == EXIT_CONFIG and end.cause is not None:
            self._on_death(actor.index, _EPOCH, end.cause)
            return
        line = f"{actor} {end.cause or describe_exit(end.exit_code)}{self._where(actor)}"
        # What ended without a word may not be the first: a node takes all its ranks with it.
        has_said_why = partial(self._has_said_why, actor.index, _EPOCH)
        if self._last_words_arrive(has_said_why) if end.cause is None else has_said_why():
            logger.info("%s; the first cause is logged above", line)
        else:
            logger.error("first cause: %s", line)
        self._on_death(actor.index, _EPOCH, line)

    def _where(self, actor: Actor) -> str:
        seen = "" if actor.index is None else self._last_seen(actor.index)
        return f"; last seen in {seen}" if seen else ""

    def _last_words_arrive(self, has_said_why: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _LAST_WORDS_S
        while not has_said_why():
            if time.monotonic() >= deadline or self._lease.wait_closed(0.01):
                return has_said_why()
        return True

    def restart(self, engine_index: int, epoch: int) -> None:
        raise NotImplementedError("no --on-engine-death replace on a Ray cluster")

    def restart_coordinator(self, epoch: int) -> None:
        raise NotImplementedError("no --on-engine-death replace on a Ray cluster")

    @property
    def exit_codes(self) -> list[int | None]:
        return [None if actor.end is None else actor.end.exit_code for actor in self._engines]

    # ----------------------------------------------------------------------------------- closing

    def close(self, patience_s: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        self._lease.close(
            lambda ray: self._end_actors(ray, patience_s, is_urgent), patience_s + _END_S
        )

    def _end_actors(self, ray: Any, patience_s: float, is_urgent: Callable[[], bool]) -> None:
        for actor in self._actors():
            actor.handle.stop.remote()
        calls = [actor.run for actor in self._actors() if actor.run is not None]
        deadline = time.monotonic() + patience_s
        while calls and time.monotonic() < deadline and not is_urgent():
            _, calls = ray.wait(calls, num_returns=len(calls), timeout=GLANCE_S)
        if calls and patience_s > 0:
            logger.warning("engine cores do not end within %.1f s; killing them", patience_s)
        for actor in self._actors():
            ray.kill(actor.handle)
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=KILL_S)
        if self._watcher is not None:
            self._watcher.join(KILL_S)

    def _actors(self) -> list[Actor]:
        coordinator = [] if self._coordinator is None else [self._coordinator]
        return [*self._engines, *coordinator]


def _on_node(config: EngineConfig, num_local_engines: int) -> EngineConfig:
    """The settings of a rank that shares its node with so many. Of GPUs an actor sees its own
    only."""
    executor = dataclasses.replace(
        config.executor,
        num_local_engines=num_local_engines,
        first_device=0,
        start_method="spawn",
    )
    return dataclasses.replace(config, executor=executor)
