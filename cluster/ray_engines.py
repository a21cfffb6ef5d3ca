"""Engine cores as actors on the nodes of a Ray cluster: the back end `ray`.

Implements `engine_group.EngineGroup`. Ray finds nodes, reserves what the ranks need, starts the
actors and tells of their deaths. No request and no token passes through it: once the cores run, the
only call under way is one that waits for their ends.

    placement group    one bundle per rank (`ray_reservation`)
    EngineCore_DP<r>   one actor per bundle (`actors`)
    DPCoordinator      an actor on this node, outside the group: it asks for nothing

Actors and group are not detached, so Ray ends them with the command, however that ends. With
`--on-engine-death replace` each rank has a group of its own, and a lost core is followed by another
actor: on its node, if that can be reached, else elsewhere (`ray_relocation`). Nobody waits until
Ray has noticed that the old one is gone; should it come back, API servers fence it.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from cluster.actors import (
    EngineActor,
    EngineStart,
    make_actor_class,
    variables_for_nodes,
)
from cluster.addresses import WireBinder
from cluster.command_watch import identify
from cluster.config import ResolvedModel, ServeConfig
from cluster.deadline import Deadline
from cluster.engine_group import Reach, successor
from cluster.model_on_node import PortableModel, make_portable
from cluster.placement import Placement, RankPlace, demand_of
from cluster.ray_actors import GLANCE_S, KILL_S, RUNTIME_ENV, Actor, answers, summarize
from cluster.ray_coordinator import RayCoordinator
from cluster.ray_lease import RayLease
from cluster.ray_watch import EndWatch
from engine.config import CoordinatorAddresses, EngineConfig, WireConfig
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ServerError
from engine.lifecycle import describe_exit
from engine.wire import EngineReady

logger = logging.getLogger(__name__)

_LOST_S = 1.0
"""How long Ray may take to hear that an actor is to be killed: its node may be gone."""

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
        self._lease = RayLease("engine cores")
        self._watch = EndWatch(
            on_death,
            has_said_why,
            last_seen,
            self._lease,
            are_deaths_apart=config.on_engine_death == "replace",
        )
        self._placement: Placement | None = None
        self._host: str | None = None
        """Where wires are bound; None: nothing leaves this node."""
        self._configs: list[EngineConfig] = []
        self._ready: dict[int, EngineReady] = {}
        """What the first ones said, by index."""
        self._model: PortableModel | None = None
        self._allow: Callable[[Sequence[bytes]], None] = lambda _: None
        self._engines: list[Actor] = []
        """The latest of each rank."""
        self._refusals: dict[int, dict[str, str]] = {}
        """By engine core: ids of nodes where it cannot run, as was found after the start, and
        why."""
        self._moving = threading.Lock()
        """Guards the placement, which threads change that restart different ranks."""
        self._coordinator = RayCoordinator(config, self._lease)

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
                are_apart=config.on_engine_death == "replace",
            )
            session = self._lease.session
            self._host = None if placement.is_local else session.address
            # A cluster of our own has the loopback device's, where nobody else reaches us.
            reach = Reach(host=self._host, address=None if session.is_ours else session.address)
        for chosen in placement.ranks:
            logger.info("placed rank=%d node=%s", self._rank(chosen), chosen.node.label)
        return reach

    def _rank(self, chosen: RankPlace) -> int:
        """Placement counts the ranks of this server; others may have lower ones."""
        return self._config.ranks[chosen.rank]

    # ---------------------------------------------------------------------------------- starting

    def start_coordinator(
        self, binder: WireBinder, api_server_keys: Sequence[bytes], deadline: Deadline
    ) -> CoordinatorAddresses | None:
        if not self._config.topology.num_coordinators:
            return None
        with self._lease.step():
            return self._coordinator.start(binder, self._host, api_server_keys, deadline)

    def start(
        self,
        model: ResolvedModel,
        wire: WireConfig,
        allow: Callable[[Sequence[bytes]], None],
        deadline: Deadline,
    ) -> None:
        assert self._placement is not None
        self._configs = self._config.engine.engine_configs(
            model,
            wire,
            self._config.environment,
            self._config.log_level,
            self._config.ranks,
        )
        if self._config.environment.worker_multiproc_method == "fork":
            logger.warning(
                "workers of a Ray actor are spawned: forks would not survive its threads"
            )
        self._model, self._allow = make_portable(model.name), allow
        with self._lease.step():
            self._engines = [self._make_engine(chosen) for chosen in self._placement.ranks]
            self._run(self._engines, deadline)

    def _make_engine(self, chosen: RankPlace, epoch: int = 0) -> Actor:
        title = f"EngineCore_DP{self._rank(chosen)}"
        options = {**self._lease.room.options(chosen.rank), "runtime_env": RUNTIME_ENV}
        made = make_actor_class(self._lease.ray, EngineActor, title)
        start = self._engine_start(chosen, epoch)
        return Actor(
            kind="engine core",
            title=title,
            node=start.node,
            handle=made.options(**options).remote(start),
            index=chosen.rank,
            epoch=epoch,
        )

    def _engine_start(self, chosen: RankPlace, epoch: int) -> EngineStart:
        assert self._placement is not None
        config = successor(self._configs[chosen.rank], epoch, self._ready.get(chosen.rank))
        is_here, variables = chosen.node.is_driver, self._config.environment
        return EngineStart(
            config=_on_node(config, len(self._placement.on(chosen.node))),
            model=None if is_here else self._model,
            node=chosen.node.label,
            command=identify(os.getpid()) if is_here else None,
            variables=variables_for_nodes(os.environ, is_ray_job=variables.is_ray_job),
        )

    def _run(self, actors: Sequence[Actor], deadline: Deadline) -> None:
        """Let engine cores load, once they are processes and everybody knows their keys."""
        calls = [actor.handle.describe.remote() for actor in actors]
        sites = self._answers(actors, calls, deadline)
        for actor, site in zip(actors, sites, strict=True):
            actor.pid = site.pid
        self._list([site.public_key for site in sites if site.public_key is not None], deadline)
        for actor in actors:
            # A duration: the clocks of two nodes have nothing in common.
            actor.run = actor.handle.run.remote(deadline.left_s)
            logger.info("started %s", actor)

    def _list(self, keys: Sequence[bytes], deadline: Deadline) -> None:
        """Let everybody know the keys of everybody who will connect; there are none on ipc."""
        if not keys:
            return
        self._allow(keys)
        self._coordinator.allow(keys, deadline)

    def _answers(
        self, actors: Sequence[Actor], calls: Sequence[Any], deadline: Deadline
    ) -> list[Any]:
        return answers(self._lease.ray, actors, calls, deadline, self._lease.check_open)

    # ------------------------------------------------------------------------ watching, replacing

    def watch(self) -> None:
        self._watch.watch(self._lease.ray, [a for a in self._actors() if a.run is not None])

    def keep_sizes(self, all_ready: Sequence[EngineReady]) -> None:
        self._ready = {ready.engine_index: ready for ready in all_ready}

    def node_of(self, engine_index: int) -> str | None:
        assert self._placement is not None
        node = self._placement.ranks[engine_index].node
        return None if node.is_driver else node.label

    def restart(self, engine_index: int, epoch: int) -> None:
        with self._replacing():
            self._restart(engine_index, epoch)

    def restart_coordinator(self, epoch: int) -> None:
        with self._replacing():
            self._coordinator.restart(epoch)
            self._watch.watch(self._lease.ray, self._actors()[-1:])

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """A step of the lease, in which a failure is one to be tried again."""
        with self._lease.step():
            try:
                yield
            except ServerError:
                raise
            except Exception as error:  # Ray's own, where its head is gone, or a node's refusal
                raise ServerError(f"Ray cannot start it anew: {summarize(error)}") from error

    def _restart(self, engine_index: int, epoch: int) -> None:
        assert self._placement is not None
        old, lost = self._placement.ranks[engine_index], self._engines[engine_index]
        self._give_up(lost)
        refused = self._refusals.setdefault(engine_index, {})
        if lost.epoch and lost.end is not None and lost.end.exit_code == EXIT_CONFIG:
            code = describe_exit(lost.end.exit_code)
            cause = lost.end.cause or f"on node {old.node.label}: {code}"
            refused[old.node.node_id] = cause  # it has no such model, say
        node = self._lease.room.move(old, refused, is_local=self._host is None)
        logger.info("placed rank=%d epoch=%d node=%s", self._rank(old), epoch, node.label)
        with self._moving:
            self._placement = self._placement.moved(engine_index, node)
        actor = self._make_engine(self._placement.ranks[engine_index], epoch)
        self._engines[engine_index] = actor
        self._run([actor], Deadline(self._config.engine.startup_timeout))
        self._watch.watch(self._lease.ray, [actor])

    def _give_up(self, actor: Actor) -> None:
        """Have an engine core killed that is lost, wherever it is, and wait for no news of it."""
        actor.is_lost = True
        kill = threading.Thread(
            target=self._lease.ray.kill, args=(actor.handle,), name="ray-kill", daemon=True
        )
        kill.start()
        kill.join(_LOST_S)

    @property
    def exit_codes(self) -> list[int | None]:
        # Settings that have worked once are not to blame for a node where they do not.
        return [
            None if actor.end is None else EXIT_FAILED if actor.epoch else actor.end.exit_code
            for actor in self._engines
        ]

    # ----------------------------------------------------------------------------------- closing

    def close(
        self,
        patience_s: float,
        is_urgent: Callable[[], bool] = lambda: False,
        loading: Collection[int] = (),
    ) -> None:
        self._lease.close(
            lambda ray: self._end_actors(ray, patience_s, is_urgent, loading),
            patience_s + _END_S,
        )

    def _end_actors(
        self,
        ray: Any,
        patience_s: float,
        is_urgent: Callable[[], bool],
        loading: Collection[int],
    ) -> None:
        for actor in self._actors():
            actor.handle.stop.remote()
        for actor in [self._engines[rank] for rank in loading]:
            if actor.end is None:
                logger.info("%s is still loading; it is not waited for", actor.title)
                ray.kill(actor.handle)
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
        self._watch.join(KILL_S)

    def _actors(self) -> list[Actor]:
        """The latest ones; the coordinator, if there is one, is the last."""
        coordinator = self._coordinator.actor
        return [*self._engines, *([] if coordinator is None else [coordinator])]


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
