"""The engine cores of one server and their coordinator, wherever they run: what `launch` asks of a
back end.

    place  -->  (launch binds the wires)  -->  start_coordinator  -->  start  -->  watch  -->  close
                                                                                     `-> restart, …

`local_engines` runs them as child processes (`--data-parallel-backend mp`), `ray_engines` as actors
on the nodes of a cluster. API servers are not part of it: they always run where the command does.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.addresses import WireBinder
from cluster.config import ResolvedModel
from cluster.deadline import Deadline
from engine.config import CoordinatorAddresses, EngineConfig, WireConfig
from engine.wire import EngineReady


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where engine cores are, seen from the API servers."""

    host: str | None = None
    """The address of this node on which the wires must be bound for them; None: all of them are
    local, and the wires are ipc."""

    address: str | None = None
    """Of this node as the others know it; None where nobody knows."""


def successor(config: EngineConfig, epoch: int, first: EngineReady | None) -> EngineConfig:
    """The settings of an engine core that takes another's place.

    Args:
        config: of the first incarnation.
        epoch: of the new one.
        first: what the first one said when it was ready. Its cache and length are the new one's:
            free memory is another by now, and requests that were accepted have to fit. None: it
            never was.
    """
    config = dataclasses.replace(config, wire=dataclasses.replace(config.wire, epoch=epoch))
    if first is None:
        return config
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=first.max_model_len),
        cache=dataclasses.replace(config.cache, num_gpu_blocks_override=first.num_gpu_blocks),
    )


class EngineGroup(Protocol):
    """Engine cores that start together and end together. In between each lives with all, or, with
    `--on-engine-death replace`, apart: then a dead one is followed by another of a higher epoch.

    Made with two callbacks. `on_death(index, epoch, cause)` is called once per dead incarnation,
    from a thread of the group's own; index None is the coordinator. `has_said_why(index, epoch)`
    tells whether the cause of its end is in the log already, by its own last words or because
    nobody waits for it any more; where it is not, the group logs it as the first cause, with what
    `last_seen(index)` knows of what the core was doing. The first incarnation has epoch 0.
    """

    def place(self, model: ResolvedModel) -> Reach:
        """Decide where every rank runs, and reserve it. Blocks, within its own deadline.

        Args:
            model: what they will load.

        Raises:
            ConfigError: they do not fit; the message compares what there is with what is needed.
        """
        ...

    def start_coordinator(
        self, binder: WireBinder, api_server_keys: Sequence[bytes], deadline: Deadline
    ) -> CoordinatorAddresses | None:
        """Start the coordinator and return where it has bound; None where one rank needs none.

        Args:
            binder: binds its wires, or knows where they must be bound.
            api_server_keys: public keys of those that may listen to it, where wires are encrypted.
            deadline: of the whole start.

        Raises:
            ServerError: it did not come up.
        """
        ...

    def start(
        self,
        model: ResolvedModel,
        wire: WireConfig,
        allow: Callable[[Sequence[bytes]], None],
        deadline: Deadline,
    ) -> None:
        """Start the engine cores. Returns when they exist, long before they are ready.

        Args:
            model: what they load; resolved on this node.
            wire: where they connect, the coordinator last.
            allow: called with the engine cores' public keys before any of them connects, where the
                wires are encrypted.
            deadline: of the whole start: they are to be ready by then.

        Raises:
            ServerError: closed meanwhile, or they could not be started.
        """
        ...

    def watch(self) -> None:
        """Begin to watch. Apart from `start`: with fork, no thread may run before."""
        ...

    def keep_sizes(self, all_ready: Sequence[EngineReady]) -> None:
        """What engine cores said when they were ready, by index: those that take their place are
        to have the same."""
        ...

    def node_of(self, engine_index: int) -> str | None:
        """The node whose loss takes this engine core along, and leaves the command. None: there is
        no such, because it is the command's own."""
        ...

    def restart(self, engine_index: int, epoch: int) -> None:
        """Start an engine core anew under a higher epoch, and watch it. What is left of the one
        before, workers included, is ended first: that it hangs, or cannot be reached, is no reason
        to wait for it. Returns when the new one exists, long before it is ready. After `watch`, in
        a thread that may wait for room elsewhere; never twice at a time for one index.

        Raises:
            ConfigError: there will be no room for it.
            ServerError: closed meanwhile, or it could not be started; to be tried again later.
        """
        ...

    def restart_coordinator(self, epoch: int) -> None:
        """The same for the coordinator, at the addresses where the one before had bound. Engine
        cores and API servers find it by themselves.

        Raises:
            ServerError: closed meanwhile, or it could not be started.
        """
        ...

    def close(
        self,
        patience_s: float,
        is_urgent: Callable[[], bool] = lambda: False,
        loading: Collection[int] = (),
    ) -> None:
        """End all of them: ask, wait, kill; give back what was reserved. Idempotent.

        Args:
            patience_s: how long they may take.
            is_urgent: asked all the time; once true, there is no more waiting.
            loading: those, by rank, that have been started anew and are not up: they are killed.
        """
        ...

    @property
    def exit_codes(self) -> Sequence[int | None]:
        """Of the latest engine cores, by rank; None while one runs."""
        ...
