"""Several API servers behind one port: children of the command, which supervises.

Implements `front.Front`. Each child has a listening socket of its own; together they form a group
in the kernel (SO_REUSEPORT), which spreads connections over them. What one of them learns of an
engine core's death the command passes on to all; the death of one ends all, and so does one whose
event loop hangs (`pulse`).
"""

import dataclasses
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import assert_never

from api.engine_handle import Loss
from cluster.api_server_process import ApiServerConfig
from cluster.api_server_process import main as api_server_main
from cluster.channel import (
    Allow,
    AnyMessage,
    Begin,
    Channel,
    Death,
    Drop,
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
from cluster.http_socket import join_group
from cluster.metrics_hub import MetricsHub
from cluster.newcomer import Memory
from cluster.pulse import INTERVAL_S, SILENCE_S, Pulse
from cluster.replacement import Replacement, Restart
from cluster.supervisor import Child, Supervisor
from engine.bound import ServerWires
from engine.config import CoordinatorAddresses
from engine.errors import ConfigError, EngineDeadError, ServerError
from engine.lifecycle import STOP_SIGNAL, StopFlag, describe_exit, in_lasting_thread
from engine.wire import Fingerprint
from workers.wakeup import Bell, Waiter

logger = logging.getLogger(__name__)

_POLL_S = 0.05
"""How soon a second signal is noticed, and that all have ended."""

_SPEAKS_LAST_S = 5.0
"""Beyond `ApiConfig.start_timeout_s`, at which API servers name engine cores that are late."""

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
        self._is_ending = False
        self._configs = configs
        self._http_sockets = http_sockets
        self._on_ready = on_ready
        self._ranks = ranks
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._bell = Bell.create()
        """Wakes `run`."""
        self._loaded: set[int] = set()
        self._began_s = math.inf
        """When the start's one deadline began to run."""
        self._first_loaded_at = 0.0
        self._supervisor = Supervisor(
            self._on_child_death,
            lambda index, epoch: self._is_over or (index, epoch) in self._given_up,
            are_deaths_apart=ranks is not None,
        )
        self._given_up: dict[tuple[int, int], str] = {}
        """Why, by index and epoch: these are killed, and the cause is in the log."""
        self._policy = Replacement(len(configs))
        self._memory = Memory()
        self._dropped_before: dict[int, float] = {}
        """By index, when the one that was replaced died."""
        self._address: tuple[str, int] = http_sockets[0].getsockname()[:2]
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
                    self._check_start()
                    waiter.wait(INTERVAL_S)
                self._is_ending = True
                self._end_children(stop)
        finally:
            stop.on_set = None
            self._supervisor.close(0.0)
            self._memory.close()
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        return 0 if self.death is None else 1

    def bind(self, wires: Sequence[ServerWires]) -> None:
        for channel, own in zip(self._channels, wires, strict=True):
            channel.send_wires(own)
            if self._ranks is None:
                own.close()
        self._memory.keep(wires)

    def begin(
        self,
        model_folder: Path,
        coordinator: CoordinatorAddresses | None,
        deadline: Deadline,
        expected: Fingerprint | None = None,
    ) -> None:
        self._began_s = deadline.began_s
        message = self._memory.begin(model_folder, coordinator, deadline, expected)
        for channel in self._channels:
            channel.send(message)

    def allow(self, public_keys: Sequence[bytes]) -> None:
        self._memory.allow(public_keys)
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
        self._memory.take_loss(engine_index, epoch)
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
                _child(config, http_socket, connection)
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
        self._listeners = [self._start_listener(index) for index in range(len(self._channels))]

    def _start_listener(self, index: int, epoch: int = 0) -> threading.Thread:
        listener = threading.Thread(
            target=self._listen,
            args=(index, epoch, self._channels[index]),
            name="api-server",
            daemon=True,
        )
        listener.start()
        return listener

    def _check_pulse(self) -> None:
        now = time.monotonic()
        epochs = self._supervisor.epochs
        with self._lock:
            due, hung, late = self._pulse.due(now), self._pulse.hung(now), self._pulse.late(now)
        for index in due:
            self._channels[index].send(Ping())
        if hung is not None:
            cause = f"hung: its event loop has not turned for {SILENCE_S:.0f} s"
            self._give_up(hung, epochs[hung], cause)
        if late is not None:
            cause = f"has not loaded within {self._configs[late].api.start_timeout_s:.0f} s"
            self._give_up(late, epochs[late], cause)

    def _check_start(self) -> None:
        """One that stands still while it loads would keep all others waiting for ever. They know
        more of engine cores that are late, and speak first. Newcomers are the pulse's."""
        limit_s = self._configs[0].api.start_timeout_s
        if self._is_serving or time.monotonic() < self._began_s + limit_s + _SPEAKS_LAST_S:
            return
        with self._lock:
            missing = [i for i in range(len(self._configs)) if i not in self._loaded]
        names = [f"{self._configs[i].title} pid={self._supervisor.pids[i]}" for i in missing]
        cause = f"API servers have not loaded within {limit_s:.0f} s: {', '.join(names)}"
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

    def _listen(self, index: int, epoch: int, channel: Channel) -> None:
        try:
            while True:
                self._take(index, channel.receive())
        except EOFError:
            pass
        except Exception as error:  # of ours, or its messages cannot be read
            logger.warning("nobody listens to %s", self._configs[index].title, exc_info=True)
            self._give_up(index, epoch, f"cannot be followed: {type(error).__name__}: {error}")
        self._metrics.drop(index)

    def _take(self, index: int, message: AnyMessage) -> None:
        match message:
            case Loaded() if self._is_serving:
                self._let_join(index)
            case Loaded(ready):
                with self._lock:
                    self._loaded.add(index)
                    self._first_loaded_at = self._first_loaded_at or time.monotonic()
                    self._pulse.take(index, time.monotonic())
                    is_last = len(self._loaded) == len(self._configs)
                if is_last and self.death is None:
                    self._is_serving = True
                    self._policy.serve()
                    for each in ready:
                        self._memory.take_ready(each)
                    for other in self._channels:
                        other.send(Serve())
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
                self._memory.take_ready(each)
                self._ranks.on_up(each)
            case Scrape(number):
                self._metrics.ask(index, number)
            case Part(families):
                self._metrics.take(index, families)
            case Pong(last_seen):
                self._last_seen = last_seen
                with self._lock:
                    self._pulse.take(index, time.monotonic())
            case Wires() | Begin() | Serve() | Allow() | Drop() | PartWanted() | Whole() | Ping():
                raise AssertionError("the command's words came from an API server")
            case _:
                assert_never(message)

    @property
    def _is_over(self) -> bool:
        return self.death is not None or self._refusal is not None

    def _on_child_death(self, index: int, epoch: int, cause: str) -> None:
        if self._ranks is None:
            self.mark_dead(None, cause)
        else:
            threading.Thread(
                target=self._replace, args=(index, epoch, cause), name="replace", daemon=True
            ).start()

    # ------------------------------------------------------------- one takes another's place

    def _replace(self, index: int, epoch: int, cause: str) -> None:
        """Start an API server in the place of one that is gone, while others serve."""
        died_at = time.time()
        cause = self._given_up.get((index, epoch), cause)
        with self._lock:
            verdict = self._policy.take_loss(index, epoch, time.monotonic())
            num_up = self._policy.num_up
            self._pulse.forget(index)
        if verdict is None or self._is_over or self._is_ending:
            return
        if not isinstance(verdict, Restart) or not num_up:
            self.mark_dead(None, cause)
            return
        title = self._configs[index].title
        logger.warning("%s is replaced; %d of %d answer", title, num_up, len(self._configs))
        self._dropped_before[index] = died_at
        self._drop(index)
        time.sleep(verdict.delay_s)
        try:
            self._start_newcomer(index, verdict.epoch)
        except (ServerError, OSError) as error:
            if not (self._is_over or self._is_ending):
                self._replace(index, verdict.epoch, f"{title} cannot be started: {error}")

    def _start_newcomer(self, index: int, epoch: int) -> None:
        config = dataclasses.replace(self._configs[index], joins=True)
        self._listeners[index].join(1.0)  # it has read what the one before has said
        ours, theirs = Pipe(duplex=True)
        http_socket = join_group(*self._address)
        try:
            self._channels[index] = channel = Channel(ours)
            self._metrics.replace(index)
            child = dataclasses.replace(_child(config, http_socket, theirs), epoch=epoch)
            with self._lock:
                within_s = config.api.start_timeout_s + _SPEAKS_LAST_S
                self._pulse.expect(index, time.monotonic() + within_s)
            self._supervisor.restart(index, child, "spawn")
        finally:
            http_socket.close()
            theirs.close()
        self._memory.tell(channel, index, time.monotonic())
        self._listeners[index] = self._start_listener(index, epoch)

    def _let_join(self, index: int) -> None:
        """It has loaded, and the engine cores have found it."""
        with self._lock:
            self._policy.take_ready(index, self._supervisor.epochs[index])
            self._pulse.take(index, time.monotonic())
            num_up = self._policy.num_up
        self._drop(index)  # again: what has just been compiled was nobody's to abort before
        self._channels[index].send(Serve())
        title = self._configs[index].title
        logger.info("%s is back; %d of %d answer", title, num_up, len(self._configs))

    def _drop(self, index: int) -> None:
        """Have the engine cores abort what an API server has left behind."""
        message = Drop(index, self._dropped_before[index])
        for other, channel in enumerate(self._channels):
            if other != index:
                channel.send(message)

    def _give_up(self, index: int, epoch: int, why: str) -> None:
        """End an API server that does not work any more; where it is replaced, only that."""
        cause = f"API server {self._configs[index].title} pid={self._supervisor.pids[index]} {why}"
        if self._ranks is None:
            self.mark_dead(None, cause, is_first=True)
        elif (index, epoch) not in self._given_up:
            self._given_up[index, epoch] = cause
            logger.error("first cause: %s", cause)
            self._supervisor.kill(index, epoch)


def _child(
    config: ApiServerConfig, http_socket: socket.socket, connection: "Connection[bytes, bytes]"
) -> Child:
    return Child(
        kind="API server",
        title=config.title,
        main=api_server_main,
        arguments=(config, http_socket, connection),
    )
