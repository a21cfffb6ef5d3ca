"""Hybrid balancing on a Ray cluster: each node has a server of its own, for the ranks there.

    command                   reserves, starts and watches; it listens nowhere
    ray::NodeServer_DP2       an actor on each node, named after its first rank
    └── python -m cluster serve … --data-parallel-start-rank 2 --data-parallel-backend mp

Requests are spread over the nodes by somebody outside, as a service of Kubernetes does; inside a
node its own API servers balance. Nothing of ours crosses the network. The end of one server ends
all, since ranks that are missing outside would be looked for by nobody.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.access import secrets_for_nodes
from cluster.actors import End, Site, adopt, make_actor_class, variables_for_nodes
from cluster.config import ServeConfig
from cluster.http_socket import url
from cluster.placement import demand_of
from cluster.ray_actors import KILL_S, RUNTIME_ENV, Actor, end_of
from cluster.ray_job import drain_s, stop_advice
from cluster.ray_lease import RayLease
from engine import log
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError
from engine.lifecycle import StopFlag, describe_exit, in_lasting_thread, stop_on_signals

logger = logging.getLogger(__name__)

_POLL_S = 0.05
"""How soon a signal or an end is noticed."""

_BEYOND_DRAIN_S = 10.0
"""How long a server may take to end after its drain."""

_END_S = 12.0
"""How long Ray may take with everything, beside what servers are due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeServerStart:
    """All that an actor is given."""

    arguments: Sequence[str]
    """Of `python -m cluster serve`."""

    variables: Mapping[str, str]
    """Environment variables of the command that count on the node too."""

    secrets: Mapping[str, str] = field(repr=False)
    """Variables that only the server gets to see: keys. Not among the arguments, which `ps` and
    Ray's dashboard show."""

    title: str
    log_level: str


class NodeServer:
    """Runs the server of one node. `run` is its whole life."""

    def __init__(self, start: NodeServerStart) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_stopped = False
        adopt(start.variables)
        log.configure(start.title, start.log_level)

    def describe(self) -> Site:
        return Site(pid=os.getpid())

    def run(self) -> End:
        """Until the server ends. It stays in Ray's process group, and so dies with the actor."""
        with self._lock:
            if self._is_stopped:
                return End(exit_code=0)
            # What it says comes to the command's log, by way of this actor's.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster", "serve", *self._start.arguments],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._start.secrets},
            )
        return End(exit_code=self._process.wait())

    def stop(self) -> None:
        """Ask the server to drain and end; a second time, to end at once. Returns at once."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)


def node_arguments(base: Sequence[str], first_rank: int, shutdown_timeout_s: float) -> list[str]:
    """The command line of the server whose first rank that is, and which has so long to drain. Of
    an option that comes again the last one counts. Pure."""
    return [
        *base,
        *("--data-parallel-backend", "mp"),
        *("--data-parallel-start-rank", str(first_rank)),
        *("--shutdown-timeout", f"{shutdown_timeout_s:g}"),
    ]


def server_title(first_rank: int) -> str:
    """Of the actor that runs the server with this and the next ranks."""
    return f"NodeServer_DP{first_rank}"


def serve(config: ServeConfig, arguments: Sequence[str]) -> int:
    """Run a server on each node until they are stopped or one ends. Main thread only.

    Args:
        config: what was asked for.
        arguments: of the command, without those that say where ranks run.

    Returns:
        The exit code: 0 after a stop, 1 after a death.

    Raises:
        ConfigError: the settings or the cluster cannot work.
    """
    if advice := stop_advice(config.shutdown_timeout, config.environment):
        logger.warning("%s", advice)
    with stop_on_signals() as stop:
        servers = _NodeServers(config, arguments)
        try:
            with in_lasting_thread(servers.start) as started:
                while not stop.is_set and servers.ended is None:
                    if started.done():
                        started.result()
                    time.sleep(_POLL_S)
        finally:
            servers.close(stop)
    if servers.ended is None:
        return 0
    if servers.ended.exit_code == EXIT_CONFIG:
        raise ConfigError("the server of a node refuses its settings; see its line above")
    return EXIT_FAILED


class _NodeServers:
    """The servers of all nodes."""

    def __init__(self, config: ServeConfig, arguments: Sequence[str]) -> None:
        self.ended: End | None = None
        """How the first that ended by itself did."""
        self._config = config
        self._arguments = arguments
        # Only this command knows what Ray grants the job; on its node a server is no job.
        self._drain_s = drain_s(config.shutdown_timeout, config.environment)
        self._lease = RayLease("servers")
        self._actors: list[Actor] = []
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Returns when they are being started."""
        with self._lease.step():
            self._start()
            self._watcher = threading.Thread(
                target=self._watch, args=(self._lease.ray,), name="node-servers", daemon=True
            )
            self._watcher.start()

    def _start(self) -> None:
        config = self._config
        num_local, devices = config.num_local_ranks, config.num_local_devices
        room = self._lease.connect(config.ray_address, num_cpus=config.num_nodes * devices)
        placement = room.take(
            lambda nodes: demand_of(nodes, devices, device=config.engine.device),
            config.num_nodes,
            "strict",
            1,
            timeout_s=config.placement_timeout,
        )
        variables = variables_for_nodes(os.environ, is_ray_job=config.environment.is_ray_job)
        secrets = secrets_for_nodes(config)
        is_tls = config.ssl_certfile is not None
        for chosen in placement.ranks:
            first_rank = chosen.rank * num_local
            start = NodeServerStart(
                arguments=node_arguments(self._arguments, first_rank, self._drain_s),
                variables=variables,
                secrets=secrets,
                title=server_title(first_rank),
                log_level=config.log_level,
            )
            made = make_actor_class(self._lease.ray, NodeServer, start.title)
            options = {**room.options(chosen.rank), "runtime_env": RUNTIME_ENV}
            handle = made.options(**options).remote(start)
            self._actors.append(
                Actor(
                    kind="server",
                    title=start.title,
                    node=chosen.node.label,
                    handle=handle,
                    run=handle.run.remote(),
                )
            )
            logger.info(
                "server of ranks %d to %d on node %s: %s",
                first_rank,
                first_rank + num_local - 1,
                chosen.node.label,
                url(config.host, config.port, chosen.node.address, is_tls=is_tls),
            )

    def _watch(self, ray: Any) -> None:
        pending = {actor.run: actor for actor in self._actors}
        while pending:
            [call], _ = ray.wait(list(pending), num_returns=1)
            actor = pending.pop(call)
            end = end_of(ray, call)
            if self._lease.is_closed:
                continue
            if self.ended is None:
                self._report(actor, end)
                self.ended = end

    def _report(self, actor: Actor, end: End) -> None:
        line = f"{actor} {end.cause or describe_exit(end.exit_code)}"
        if end.cause is None and end.exit_code >= 0:
            logger.info("%s; its cause is logged above", line)
        else:  # it was killed, or its actor was
            logger.error("first cause: %s", line)

    def close(self, stop: StopFlag) -> None:
        """Drain, end and give back. Idempotent."""
        self._lease.close(
            lambda ray: self._end_actors(ray, stop), self._drain_s + _BEYOND_DRAIN_S + _END_S
        )

    def _end_actors(self, ray: Any, stop: StopFlag) -> None:
        calls = [actor.run for actor in self._actors]
        deadline = time.monotonic() + self._drain_s + _BEYOND_DRAIN_S
        num_asked = 0
        while calls and time.monotonic() < deadline:
            if num_asked < max(1, stop.count):
                num_asked += 1
                for actor in self._actors:
                    actor.handle.stop.remote()
            _, calls = ray.wait(calls, num_returns=len(calls), timeout=_POLL_S)
        for actor in self._actors:
            ray.kill(actor.handle)
        if self._watcher is not None:  # once disconnected, Ray would connect again for its calls
            self._watcher.join(KILL_S)
