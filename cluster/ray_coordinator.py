"""The DP coordinator of a server on a Ray cluster: an actor on the command's node, started anew
where it is lost. It asks for nothing, so it needs no place. Used by `ray_engines`.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Sequence

from cluster.actors import Site, make_actor_class
from cluster.addresses import WireBinder
from cluster.command_watch import identify
from cluster.config import ServeConfig
from cluster.coordinator_actor import CoordinatorActor, CoordinatorStart
from cluster.deadline import Deadline
from cluster.ray_actors import RUNTIME_ENV, Actor, answers
from cluster.ray_lease import RayLease
from engine import run_log
from engine.config import CoordinatorAddresses
from engine.errors import ServerError

logger = logging.getLogger(__name__)

_TITLE = "DPCoordinator"


class RayCoordinator:
    """The coordinator and its successors. Called within a step of the lease."""

    def __init__(self, config: ServeConfig, lease: RayLease) -> None:
        self._config = config
        self._lease = lease
        self._start: CoordinatorStart | None = None
        self._keys: list[bytes] = []
        """Of all that may connect."""
        self.actor: Actor | None = None
        """The latest."""

    def start(
        self,
        binder: WireBinder,
        host: str | None,
        api_server_keys: Sequence[bytes],
        deadline: Deadline,
    ) -> CoordinatorAddresses:
        """Start it, and return where it has bound.

        Args:
            binder: knows the names of ipc sockets.
            host: the address to bind; None: ipc.
            api_server_keys: public keys of those that may listen to it.
            deadline: of the whole start.
        """
        is_replaced = self._config.on_engine_death == "replace"
        start = CoordinatorStart(
            # Listening sockets cannot travel to an actor: over TCP it binds its own.
            wires=binder.coordinator() if host is None else None,
            host=host,
            port_range=self._config.wire_port_range,
            num_engines=self._config.topology.num_engines,
            log_level=self._config.log_level,
            run_folder=run_log.folder(),
            command=identify(os.getpid()),
            key_file=binder.private_file("coordinator-keys") if host and is_replaced else None,
        )
        self._keys = list(api_server_keys)
        addresses = self._run(start, 0, deadline)
        self._start = dataclasses.replace(start, predecessor=addresses)
        return addresses

    def restart(self, epoch: int) -> None:
        """Start another where the last one was, which is gone."""
        assert self._start is not None
        self._run(self._start, epoch, Deadline(self._config.engine.startup_timeout))

    def allow(self, keys: Sequence[bytes], deadline: Deadline) -> None:
        """Let engine cores with these keys connect."""
        self._keys += keys
        if self.actor is None:
            return
        # One that is being replaced cannot hear it; its successor is told of all.
        is_apart = self._config.on_engine_death == "replace"
        with contextlib.suppress(ServerError) if is_apart else contextlib.nullcontext():
            self._answers([self.actor.handle.allow.remote(list(keys))], deadline)

    def _run(self, start: CoordinatorStart, epoch: int, deadline: Deadline) -> CoordinatorAddresses:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        session = self._lease.session
        options = {
            "num_cpus": 0,
            "runtime_env": RUNTIME_ENV,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(session.node_id, soft=False),
        }
        made = make_actor_class(session.ray, CoordinatorActor, _TITLE)
        handle = made.options(**options).remote(start)
        actor = self.actor = Actor(
            kind="coordinator", title=_TITLE, node=str(session), handle=handle, epoch=epoch
        )
        calls = [handle.bind.remote(list(self._keys)), handle.describe.remote()]
        addresses, site = self._answers(calls, deadline)
        assert isinstance(site, Site)
        actor.pid = site.pid
        actor.run = handle.run.remote()
        logger.info("started %s", actor)
        assert isinstance(addresses, CoordinatorAddresses)
        return addresses

    def _answers(self, calls: Sequence[object], deadline: Deadline) -> list[object]:
        assert self.actor is not None
        actors = [self.actor for _ in calls]
        return answers(self._lease.ray, actors, calls, deadline, self._lease.check_open)
