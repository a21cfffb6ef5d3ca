"""Several API servers behind one port: children of the command, which supervises.

Implements `front.Front`. Each child has a listening socket of its own; together they form a group
in the kernel (SO_REUSEPORT), which spreads connections over them. What one of them learns of an
engine core's death the command passes on to all; the death of one ends all, and so does one whose
event loop hangs (`pulse`).
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import assert_never

from api.engine_handle import Loss
from cluster.api_server_process import ApiServerConfig
from cluster.api_server_process import main as api_server_main
from cluster.channel import (
    Allow,
    Begin,
    Channel,
    Death,
    Loaded,
    Lost,
    Part,
    PartWanted,
    Ping,
    Pong,
    Refusal,
    Scrape,
    Serve,
    Up,
    Whole,
    Wires,
)
from cluster.deadline import Deadline
from cluster.front import OnReady, RankWatcher
from cluster.metrics_hub import MetricsHub
from cluster.pulse import INTERVAL_S, SILENCE_S, Pulse
from cluster.supervisor import Child, Supervisor
from engine.bound import ServerWires
from engine.config import CoordinatorAddresses
from engine.errors import ConfigError, EngineDeadError
from engine.lifecycle import STOP_SIGNAL, StopFlag, describe_exit, in_lasting_thread
from engine.wire import Fingerprint
from workers.wakeup import Bell, Waiter

logger = logging.getLogger(__name__)

_POLL_S = 0.05
"""How soon a second signal is noticed, and that all have ended."""

_LAST_ANSWERS_S = 5.0
"""How long an API server may take beyond its drain, or after a death: terminal errors of streams,
last answers to probes."""


class ApiServers:
    """API servers as child processes, by client index.

    Args:
        configs: settings of each.
        http_sockets: one for each; they listen already.
        on_ready: called once, when all serve.
        ranks: told of those that come and go, where they are replaced.
    """

    def __init__(
        self,
        configs: Sequence[ApiServerConfig],
        http_sockets: Sequence[socket.socket],
        on_ready: OnReady,
        ranks: RankWatcher | None = None,
    ) -> None:
        self.death: EngineDeadError | None = None
        self._is_serving = False
        self._configs = configs
        self._http_sockets = http_sockets
        self._on_ready = on_ready
        self._ranks = ranks
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._bell = Bell.create()
        """Wakes `run`."""
        self._num_loaded = 0
        self._first_loaded_at = 0.0
        self._supervisor = Supervisor(self._on_child_death, lambda *_: self._is_over)
        ends = [Pipe(duplex=True) for _ in configs]
        self._channels = [Channel(ours) for ours, _ in ends]
        self._metrics = MetricsHub(self._channels)
        self._pulse = Pulse()
        self._their_ends = [theirs for _, theirs in ends]
        self._last_seen: list[str] = []
        """What each engine core was doing; the latest that any API server has said."""

    # ------------------------------------------------------------------------- what launch asks

    def run(self, start: Callable[[], Path], stop: StopFlag) -> int:
        self._spawn()
        stop.on_set = self._bell.ring
        waiter = Waiter([self._bell])
        try:
            with in_lasting_thread(start) as started:
                started.add_done_callback(lambda _: self._bell.ring())
                while not self._is_over and not stop.is_set:
                    if started.done():
                        started.result()
                    self._check_pulse()
                    waiter.wait(INTERVAL_S)
                self._end_children(stop)
        finally:
            stop.on_set = None
            self._supervisor.close(0.0)
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        return 0 if self.death is None else 1

    def bind(self, wires: Sequence[ServerWires]) -> None:
        for channel, own in zip(self._channels, wires, strict=True):
            channel.send_wires(own)
            own.close()

    def begin(
        self,
        model_folder: Path,
        coordinator: CoordinatorAddresses | None,
        deadline: Deadline,
        expected: Fingerprint | None = None,
    ) -> None:
        for channel in self._channels:
            channel.send(Begin(str(model_folder), coordinator, deadline.began_s, expected))

    def allow(self, public_keys: Sequence[bytes]) -> None:
        for channel in self._channels:
            channel.send(Allow(list(public_keys)))

    def mark_dead(self, engine_index: int | None, cause: str, is_first: bool = False) -> None:
        first_rank = self._configs[0].api.first_rank
        rank = None if engine_index is None else first_rank + engine_index
        with self._lock:
            if self.death is not None:
                return
            self.death = EngineDeadError(rank, cause)
        self._bell.ring()
        if is_first:
            who = "" if rank is None else f"engine core DP{rank}: "
            logger.error("first cause: %s%s", who, cause)
        for channel in self._channels:
            channel.send(Death(engine_index, cause))

    def lose(self, engine_index: int, epoch: int, cause: str) -> None:
        for channel in self._channels:
            channel.send(Lost(engine_index, epoch, cause))

    def last_seen(self, engine_index: int) -> str:
        last_seen = self._last_seen
        return last_seen[engine_index] if last_seen else ""

    @property
    def heeds_stop(self) -> bool:
        is_hung = self.death is not None and self.death.cause.startswith("hung")
        return self._is_serving and not is_hung

    # -------------------------------------------------------------------------------- children

    def _spawn(self) -> None:
        self._supervisor.start(
            [
                Child(
                    kind="API server",
                    title=config.title,
                    main=api_server_main,
                    arguments=(config, http_socket, connection),
                )
                for config, http_socket, connection in zip(
                    self._configs, self._http_sockets, self._their_ends, strict=True
                )
            ],
            "spawn",
        )
        # The children's are to be the only ones: they close when those do.
        for http_socket in self._http_sockets:
            http_socket.close()
        for connection in self._their_ends:
            connection.close()
        self._supervisor.watch()
        self._metrics.start()
        for index in range(len(self._channels)):
            threading.Thread(
                target=self._listen, args=(index,), name="api-server", daemon=True
            ).start()

    def _check_pulse(self) -> None:
        now = time.monotonic()
        with self._lock:
            due, hung = self._pulse.due(now), self._pulse.hung(now)
        for index in due:
            self._channels[index].send(Ping())
        if hung is not None:
            name = f"API server {self._configs[hung].title} pid={self._supervisor.pids[hung]}"
            cause = f"{name} hung: its event loop has not turned for {SILENCE_S:.0f} s"
            self.mark_dead(None, cause, is_first=True)

    def _end_children(self, stop: StopFlag) -> None:
        """Wait for the drain, or for the last answers after a death; pass on further signals."""
        num_asked = 0
        patience_s = _LAST_ANSWERS_S
        if self.death is None:
            patience_s += self._configs[0].api.shutdown_timeout_s
            self._supervisor.unwatch()
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and None in self._supervisor.exit_codes:
            if self.death is None and num_asked < stop.count:
                num_asked += 1
                self._supervisor.ask()
            time.sleep(_POLL_S)
        self._report_crashes()

    def _report_crashes(self) -> None:
        """Nobody watches any more while they drain, and a crash there breaks streams as well."""
        codes = self._supervisor.exit_codes
        for config, pid, code in zip(self._configs, self._supervisor.pids, codes, strict=True):
            if self.death is None and code not in (None, 0, -STOP_SIGNAL):
                name = f"API server {config.title} pid={pid}"
                self.mark_dead(None, f"{name} {describe_exit(code)} while draining", is_first=True)

    def _listen(self, index: int) -> None:
        while True:
            try:
                message = self._channels[index].receive()
            except EOFError:
                self._metrics.drop(index)
                return
            match message:
                case Loaded(ready):
                    with self._lock:
                        self._num_loaded += 1
                        self._first_loaded_at = self._first_loaded_at or time.monotonic()
                        self._pulse.take(index, time.monotonic())
                        is_last = self._num_loaded == len(self._configs)
                    if is_last and self.death is None:
                        self._is_serving = True
                        for channel in self._channels:
                            channel.send(Serve())
                        self._on_ready(ready, time.monotonic() - self._first_loaded_at)
                case Refusal(text):
                    self._refusal = self._refusal or text
                    self._bell.ring()
                case Death(engine_index, cause, is_first):
                    self.mark_dead(engine_index, cause, is_first)
                case Lost(engine_index, epoch, cause, is_first):
                    assert self._ranks is not None
                    self._ranks.on_loss(Loss(engine_index, epoch, cause, is_first))
                case Up(each):
                    assert self._ranks is not None
                    self._ranks.on_up(each)
                case Scrape(number):
                    self._metrics.ask(index, number)
                case Part(families):
                    self._metrics.take(index, families)
                case Pong(last_seen):
                    self._last_seen = last_seen
                    with self._lock:
                        self._pulse.take(index, time.monotonic())
                case Wires() | Begin() | Serve() | Allow() | PartWanted() | Whole() | Ping():
                    raise AssertionError("the command's words came from an API server")
                case _:
                    assert_never(message)

    @property
    def _is_over(self) -> bool:
        return self.death is not None or self._refusal is not None

    def _on_child_death(self, index: int, epoch: int, cause: str) -> None:
        self.mark_dead(None, cause)
