"""The API servers of one server: in the command's own process, or as children of it.

`launch` starts the engine cores and tells a `Front` where to bind, when to begin and who has died.
One API server is the command itself (`OwnApiServer`); several are its children (`api_servers`).
"""

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from api.config import ApiConfig
from api.engine_client import EngineClient
from api.engine_handle import Loss
from api.process import run as run_api_server
from cluster.deadline import Deadline
from engine.bound import ServerWires
from engine.config import CoordinatorAddresses
from engine.errors import EngineDeadError
from engine.lifecycle import StopFlag, freeze_heap, set_title
from engine.wire import EngineReady, Fingerprint

OnReady = Callable[[Sequence[EngineReady], float], None]
"""With what the engine cores have said, and the seconds since all of them have."""


class RankWatcher(Protocol):
    """Who is told of ranks that come and go, where they are replaced. From any thread; both return
    at once."""

    def on_loss(self, loss: Loss) -> None:
        """An API server has seen it, and has sent the requests elsewhere."""
        ...

    def on_up(self, ready: EngineReady) -> None:
        """An API server has heard READY."""
        ...


class Front(Protocol):
    """The API servers of one server."""

    def run(self, start: Callable[[], Path], stop: StopFlag) -> int:
        """Answer from the first moment; serve once `start` has started the engine cores and they
        are ready, until stopped or dead. Main thread only.

        Args:
            start: calls `bind` and `begin`, starts the engine cores, and returns the model's
                folder. Runs in a thread that lives as long as this call.
            stop: set by signals.

        Returns:
            The exit code: 0 after a stop, 1 after a death.

        Raises:
            ConfigError: the settings or the model cannot work.
        """
        ...

    def bind(self, wires: Sequence[ServerWires]) -> None:
        """Serve these sockets, by client index, before any engine core connects."""
        ...

    def begin(
        self,
        model_folder: Path,
        coordinator: CoordinatorAddresses | None,
        deadline: Deadline,
        expected: Fingerprint | None = None,
    ) -> None:
        """Engine cores are starting, within the deadline, and have to be as `expected`."""
        ...

    def allow(self, public_keys: Sequence[bytes]) -> None:
        """Admit engine cores with these keys, before they connect."""
        ...

    def mark_dead(self, engine_index: int | None, cause: str) -> None:
        """An engine core is gone, or (None) another process that the server cannot live without.
        From any thread; only the first has an effect."""
        ...

    def lose(self, engine_index: int, epoch: int, cause: str) -> None:
        """An incarnation of an engine core is gone, and the server outlives it: its streams go on
        elsewhere, and another may come under a higher epoch. From any thread."""
        ...

    @property
    def death(self) -> EngineDeadError | None:
        """What ended the server."""
        ...

    def last_seen(self, engine_index: int) -> str:
        """What an engine core was doing when it was last heard of; empty: it has not been. From any
        thread."""
        ...

    @property
    def heeds_stop(self) -> bool:
        """Whether all engine cores would act on a stop: they have loaded, and none hangs."""
        ...


class OwnApiServer:
    """One API server, in this process.

    Args:
        config: settings of the API server.
        http_socket: listens already.
        client: neither bound nor used so far.
        on_ready: called once, when requests are served.
        ranks: told of those that come and go, where they are replaced.
    """

    def __init__(
        self,
        config: ApiConfig,
        http_socket: socket.socket,
        client: EngineClient,
        on_ready: OnReady,
        ranks: RankWatcher | None = None,
    ) -> None:
        self._config = config
        self._http_socket = http_socket
        self._client = client
        self._on_ready = on_ready
        self._began_s = time.monotonic()
        if ranks is not None:
            client.deaths.on_loss, client.on_ready = ranks.on_loss, ranks.on_up

    def run(self, start: Callable[[], Path], stop: StopFlag) -> int:
        set_title("APIServer_0")
        return run_api_server(
            self._config,
            self._http_socket,
            self._client,
            start,
            stop,
            self._may_serve,
            began=lambda: self._began_s,
        )

    async def _may_serve(self, ready: Sequence[EngineReady]) -> None:
        """There is no other API server to wait for."""
        freeze_heap()
        self._on_ready(ready, time.monotonic() - self._client.ready_at)

    def bind(self, wires: Sequence[ServerWires]) -> None:
        [own] = wires
        self._client.bind(own)

    def begin(
        self,
        model_folder: Path,
        coordinator: CoordinatorAddresses | None,
        deadline: Deadline,
        expected: Fingerprint | None = None,
    ) -> None:
        self._began_s = deadline.began_s
        if expected is not None:
            self._client.expect(expected)
        if coordinator is not None:
            self._client.follow(coordinator)

    def allow(self, public_keys: Sequence[bytes]) -> None:
        self._client.allow(public_keys)

    def mark_dead(self, engine_index: int | None, cause: str) -> None:
        self._client.mark_dead(engine_index, cause)

    def lose(self, engine_index: int, epoch: int, cause: str) -> None:
        self._client.lose(engine_index, epoch, cause)

    @property
    def death(self) -> EngineDeadError | None:
        return self._client.death

    def last_seen(self, engine_index: int) -> str:
        return self._client.engines[engine_index].last_seen_in

    @property
    def heeds_stop(self) -> bool:
        return self._client.heeds_stop
