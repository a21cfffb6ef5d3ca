"""Engine cores as actors on the nodes of a Ray cluster: the back end `ray`.

Implements `engine_group.EngineGroup`. Ray finds nodes, reserves what the ranks need, starts the
actors and tells of their deaths. No request and no token passes through it: once the cores run, the
only call under way is one that waits for their ends.

    placement group    one bundle per rank (`ray_reservation`)
    EngineCore_DP<r>   one actor per bundle (`actors`)
    DPCoordinator      an actor on this node, outside the group: it asks for nothing

Actors and group are not detached, so Ray ends them with the command, however that ends.
"""

import contextlib
import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from cluster.engine_group import Reach
from cluster.model_on_node import make_portable
from cluster.placement import (
    Placement,
    RankPlace,
    demand_of,
)
from cluster.ray_reservation import Reservation
from cluster.ray_session import RaySession, connect
from engine.config import CoordinatorAddresses, EngineConfig, WireConfig
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, ServerError
from engine.lifecycle import describe_exit

logger = logging.getLogger(__name__)

_GLANCE_S = 0.1
"""How soon a wait notices that the server is being closed."""

_LAST_WORDS_S = 2.0
"""How long a core's message that says why it ends may take after its end."""

_KILL_S = 5.0
"""How long Ray may take to end actors that it was told to kill."""

_END_S = 12.0
"""How long it may take with everything, beside the patience that actors are due."""

# Ray's workers have nice level 15. An engine core is no background job, and its children inherit.
RUNTIME_ENV = {"env_vars": {"RAY_worker_niceness": "0"}}


@dataclass(slots=True)
class _Actor:
    """One actor, as the command knows it."""

    index: int | None
    """Of an engine core among those of this server; None: the coordinator."""
    title: str
    node: str
    handle: Any
    pid: int = 0
    run: Any = None
    """The call that lasts as long as the actor's work."""
    end: End | None = None

    def __str__(self) -> str:
        kind = "coordinator" if self.index is None else "engine core"
        return f"{kind} {self.title} node={self.node} pid={self.pid}"


class RayEngines:
    """The engine cores of one server on a Ray cluster.

    Args:
        config: what was asked for.
        on_death: called once per dead core with its rank and the cause, from a thread; rank None is
            the coordinator.
        has_said_why: whether the first cause of the server's end is in the log already.
    """

    def __init__(
        self,
        config: ServeConfig,
        on_death: Callable[[int | None, str], None],
        has_said_why: Callable[[], bool],
    ) -> None:
        self._config = config
        self._on_death = on_death
        self._has_said_why = has_said_why
        self._starting = threading.Lock()
        """Held by each step of the start: `close` waits for the one under way."""
        self._is_closed = threading.Event()
        self._session: RaySession | None = None
        self._room: Reservation | None = None
        self._placement: Placement | None = None
        self._engines: list[_Actor] = []
        self._coordinator: _Actor | None = None
        self._watcher: threading.Thread | None = None

    # ----------------------------------------------------------------------------------- placing

    def place(self) -> Reach:
        with self._starting:
            self._check_open()
            config = self._config
            num_cpus = len(config.ranks) * config.engine.world_size
            session = self._session = connect(config.ray_address, num_cpus=num_cpus)
            self._room = Reservation(session, self._check_open, f"raywire-{os.getpid()}")
            placement = self._placement = self._room.take(
                lambda nodes: demand_of(
                    nodes, config.engine.world_size, device=config.engine.device
                ),
                len(config.ranks),
                config.strategy,
                config.data_parallel_size_local,
                timeout_s=config.placement_timeout,
            )
        for chosen in placement.ranks:
            logger.info("placed rank=%d node=%s", self._rank(chosen), chosen.node.label)
        return Reach(host=self._host, address=session.address)

    def _rank(self, chosen: RankPlace) -> int:
        """Placement counts the ranks of this server; others may have lower ones."""
        return self._config.ranks[chosen.rank]

    @property
    def _host(self) -> str | None:
        """Where wires are bound; None: nothing leaves this node."""
        assert self._placement is not None
        return None if self._placement.is_local else self._connected.address

    # ---------------------------------------------------------------------------------- starting

    def start_coordinator(
        self, binder: WireBinder, api_server_keys: Sequence[bytes]
    ) -> CoordinatorAddresses | None:
        if not self._config.topology.num_coordinators:
            return None
        with self._starting:
            self._check_open()
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
            addresses, site = self._results([actor, actor], calls)
            actor.pid = site.pid
            actor.run = actor.handle.run.remote()
            logger.info("started %s", actor)
            assert isinstance(addresses, CoordinatorAddresses)
            return addresses

    def _make_coordinator(self, start: CoordinatorStart) -> _Actor:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        session = self._connected
        title = "DPCoordinator"
        options = {
            "num_cpus": 0,
            "runtime_env": RUNTIME_ENV,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(session.node_id, soft=False),
        }
        made = make_actor_class(session.ray, CoordinatorActor, title)
        return _Actor(None, title, str(session), made.options(**options).remote(start))

    def start(
        self,
        model: ResolvedModel,
        wire: WireConfig,
        allow: Callable[[Sequence[bytes]], None],
    ) -> None:
        assert self._placement is not None
        with self._starting:
            self._check_open()
            starts = self._engine_starts(model, wire)
            for chosen, start in zip(self._placement.ranks, starts, strict=True):
                self._engines.append(self._make_engine(chosen, start))
            calls = [actor.handle.describe.remote() for actor in self._engines]
            sites = self._results(self._engines, calls)
            self._allow(wire, sites, allow)
            for actor, site in zip(self._engines, sites, strict=True):
                actor.pid = site.pid
                actor.run = actor.handle.run.remote()
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

    def _make_engine(self, chosen: RankPlace, start: EngineStart) -> _Actor:
        assert self._room is not None
        title = f"EngineCore_DP{self._rank(chosen)}"
        options = {**self._room.options(chosen.rank), "runtime_env": RUNTIME_ENV}
        made = make_actor_class(self._connected.ray, EngineActor, title)
        return _Actor(chosen.rank, title, start.node, made.options(**options).remote(start))

    def _allow(
        self, wire: WireConfig, sites: Sequence[Site], allow: Callable[[Sequence[bytes]], None]
    ) -> None:
        """Let everybody know the keys of everybody who will connect."""
        if wire.curve is None:
            return
        keys = [site.public_key for site in sites if site.public_key is not None]
        allow(keys)
        if self._coordinator is not None:
            self._results([self._coordinator], [self._coordinator.handle.allow.remote(keys)])

    def _results(self, actors: Sequence[_Actor], calls: Sequence[Any]) -> list[Any]:
        """What the actors answer to the calls; they may still be starting.

        Raises:
            ConfigError: an actor refuses its settings.
            ServerError: an actor has failed, or the server is being closed.
        """
        ray = self._connected.ray
        deadline = time.monotonic() + self._config.engine.startup_timeout
        while len(ray.wait(list(calls), num_returns=len(calls), timeout=_GLANCE_S)[0]) < len(calls):
            self._check_open()
            if time.monotonic() >= deadline:
                done = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]
                late = [a.title for a, c in zip(actors, calls, strict=True) if c not in done]
                raise ServerError(
                    f"Ray has not started {', '.join(late)} within"
                    f" {self._config.engine.startup_timeout:g} s (--startup-timeout)"
                )
        results = []
        for actor, call in zip(actors, calls, strict=True):
            try:
                results.append(ray.get(call))
            except Exception as error:
                if isinstance(refusal := getattr(error, "cause", None), ConfigError):
                    raise ConfigError(f"on node {actor.node}: {refusal}") from error
                raise ServerError(f"{actor} could not be started: {summarize(error)}") from error
        return results

    # ---------------------------------------------------------------------------------- watching

    def watch(self) -> None:
        self._watcher = threading.Thread(
            target=self._watch, args=(self._connected.ray,), name="ray-watch", daemon=True
        )
        self._watcher.start()

    def _watch(self, ray: Any) -> None:
        pending = {actor.run: actor for actor in self._actors() if actor.run is not None}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1)  # no timeout: asleep until then
            for call in done:
                self._report(pending.pop(call), _end_of(ray, call))

    def _report(self, actor: _Actor, end: End) -> None:
        actor.end = end
        if self._is_closed.is_set():
            return
        if end.exit_code == EXIT_CONFIG and end.cause is not None:
            self._on_death(actor.index, end.cause)
            return
        line = f"{actor} {end.cause or describe_exit(end.exit_code)}"
        # What ended without a word may not be the first: a node takes all its ranks with it.
        if self._last_words_arrive() if end.cause is None else self._has_said_why():
            logger.info("%s; the first cause is logged above", line)
        else:
            logger.error("first cause: %s", line)
        self._on_death(actor.index, line)

    def _last_words_arrive(self) -> bool:
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._has_said_why():
            if time.monotonic() >= deadline or self._is_closed.wait(0.01):
                return self._has_said_why()
        return True

    @property
    def exit_codes(self) -> list[int | None]:
        return [None if actor.end is None else actor.end.exit_code for actor in self._engines]

    # ----------------------------------------------------------------------------------- closing

    def close(self, patience_s: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        self._is_closed.set()
        # A step of the start notices soon, but for `ray.init`, which cannot be cut short: Ray ends
        # with this process then.
        if not self._starting.acquire(timeout=2.0):
            logger.warning("Ray is still connecting; it ends with this process")
            return
        try:
            session, self._session = self._session, None  # further calls would connect again
            if session is not None and not session.end_within(
                patience_s + _END_S, lambda: self._end(session, patience_s, is_urgent)
            ):
                logger.warning("Ray does not answer; what is left of it ends with this process")
        finally:
            self._starting.release()

    def _end(self, session: RaySession, patience_s: float, is_urgent: Callable[[], bool]) -> None:
        with contextlib.ExitStack() as ending:
            ending.callback(session.close)
            if self._room is not None and not session.is_ours:
                ending.callback(self._room.give_back)
            self._end_actors(session.ray, patience_s, is_urgent)

    def _end_actors(self, ray: Any, patience_s: float, is_urgent: Callable[[], bool]) -> None:
        for actor in self._actors():
            actor.handle.stop.remote()
        calls = [actor.run for actor in self._actors() if actor.run is not None]
        deadline = time.monotonic() + patience_s
        while calls and time.monotonic() < deadline and not is_urgent():
            _, calls = ray.wait(calls, num_returns=len(calls), timeout=_GLANCE_S)
        if calls and patience_s > 0:
            logger.warning("engine cores do not end within %.1f s; killing them", patience_s)
        for actor in self._actors():
            ray.kill(actor.handle)
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_KILL_S)
        if self._watcher is not None:
            self._watcher.join(_KILL_S)

    def _actors(self) -> list[_Actor]:
        coordinator = [] if self._coordinator is None else [self._coordinator]
        return [*self._engines, *coordinator]

    # ------------------------------------------------------------------------------------ common

    @property
    def _connected(self) -> RaySession:
        assert self._session is not None
        return self._session

    def _check_open(self) -> None:
        if self._is_closed.is_set():
            raise ServerError("stopped before the engine cores were started")


def _end_of(ray: Any, run: Any) -> End:
    """How an actor ended whose call of `run` is over."""
    try:
        end = ray.get(run)
    except Exception as error:  # noqa: BLE001 - Ray's for a dead actor, or any that it raised
        return End(exit_code=EXIT_FAILED, cause=summarize(error))
    assert isinstance(end, End)
    return end


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


_DEATH = re.compile(r"The actor is dead because (?:its )?(.*)", re.DOTALL)
_DETAIL = re.compile(r"\.?\s*Worker exit type: (\S+)\s+Worker exit detail: ", re.DOTALL)
_ADVICE = re.compile(r"\s*(Some common causes include|To troubleshoot).*", re.DOTALL)


def summarize(error: BaseException) -> str:
    """What an operator needs of Ray's account of a death: one line. Pure."""
    text = str(error)
    if death := _DEATH.search(text):
        told = _DETAIL.sub(r" (\1): ", _ADVICE.sub("", death[1]))
        return f"died: {' '.join(told.split())}"[:500]
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""  # of a traceback, as RayTaskError has it
    return f"failed: {type(error).__name__}: {last}"[:500]
