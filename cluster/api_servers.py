"""Several API servers behind one port: children of the command, which supervises.

Implements `front.Front`. Each child has a listening socket of its own; together they form a group
in the kernel (SO_REUSEPORT), which spreads connections over them. What one of them learns of an
engine core's death the command passes on to all; the death of one ends all, and so does one whose
event loop hangs (`pulse`). Where engine cores are replaced, API servers are, too. Processes and
channels are `api_server_children`'s.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import assert_never

from api.engine_handle import Loss
from cluster.api_server_children import ApiServerChildren
from cluster.api_server_process import ApiServerConfig
from cluster.channel import (
    Allow,
    AnyMessage,
    Begin,
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
from cluster.newcomer import Memory
from cluster.pulse import INTERVAL_S, SILENCE_S, Pulse
from cluster.replacement import GiveUp, Replacement, Restart
from cluster.supervisor import Supervisor
from engine.bound import ServerWires
from engine.config import CoordinatorAddresses
from engine.errors import ConfigError, EngineDeadError, ServerError
from engine.lifecycle import STOP_SIGNAL, StopFlag, describe_exit, in_lasting_thread
from engine.wire import EngineReady, Fingerprint
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
        self._pulse = Pulse()
        self._children = ApiServerChildren(
            configs, http_sockets, self._supervisor, self._take, self._give_up
        )
        self._last_seen: list[str] = []
        """What each engine core was doing; the latest that any API server has said."""

    # ------------------------------------------------------------------------- what launch asks

    def run(self, start: Callable[[], Path], stop: StopFlag) -> int:
        self._children.start()
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
        for channel, own in zip(self._children.channels, wires, strict=True):
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
        self._children.tell_all(self._memory.begin(model_folder, coordinator, deadline, expected))

    def allow(self, public_keys: Sequence[bytes]) -> None:
        self._memory.allow(public_keys)
        self._children.tell_all(Allow(list(public_keys)))

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
        self._children.tell_all(Death(engine_index, cause))

    def lose(self, engine_index: int, epoch: int, cause: str) -> None:
        self._memory.take_loss(engine_index, epoch)
        self._children.tell_all(Lost(engine_index, epoch, cause))

    def last_seen(self, engine_index: int) -> str:
        last_seen = self._last_seen
        return last_seen[engine_index] if last_seen else ""

    @property
    def heeds_stop(self) -> bool:
        is_hung = self.death is not None and self.death.cause.startswith("hung")
        return self._is_serving and not is_hung

    # -------------------------------------------------------------------------------- children

    def _check_pulse(self) -> None:
        now = time.monotonic()
        epochs = self._supervisor.epochs
        with self._lock:
            due, hung, late = self._pulse.due(now), self._pulse.hung(now), self._pulse.late(now)
        for index in due:
            self._children.tell(index, Ping())
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
        names = [self._children.name(i) for i in missing]
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
        """Nobody watches any more while they drain, and a crash there breaks streams as well. One
        that waited to be replaced is an earlier loss, which was told."""
        both = zip(self._supervisor.exit_codes, self._supervisor.epochs, strict=True)
        for index, (code, epoch) in enumerate(both):
            if self._policy.is_known(index, epoch):
                continue
            if self.death is None and code not in (None, 0, -STOP_SIGNAL):
                end = f"{self._children.name(index)} {describe_exit(code)} while draining"
                self.mark_dead(None, f"API server {end}", is_first=True)

    # -------------------------------------------------------------------------- what they say

    def _take(self, index: int, message: AnyMessage) -> None:
        match message:
            case Loaded() if self._is_serving:
                self._let_join(index)
            case Loaded(ready):
                self._take_loaded(index, ready)
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
            case Pong(last_seen):
                self._last_seen = last_seen
                with self._lock:
                    self._pulse.take(index, time.monotonic())
            case Scrape() | Part():
                raise AssertionError("metrics are taken in by `api_server_children`")
            case Wires() | Begin() | Serve() | Allow() | Drop() | PartWanted() | Whole() | Ping():
                raise AssertionError("the command's words came from an API server")
            case _:
                assert_never(message)

    def _take_loaded(self, index: int, ready: Sequence[EngineReady]) -> None:
        """It could take requests: once all could, they do."""
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
            self._children.tell_all(Serve())
            self._on_ready(ready, time.monotonic() - self._first_loaded_at)

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
            alone = "no API server is left that answers"
            reason = verdict.reason if isinstance(verdict, GiveUp) else alone
            if reason is not None:
                logger.warning("the server ends: %s", reason)
                cause = f"{cause}; {reason}"
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
        self._children.hear_out(index)
        with self._lock:
            self._pulse.forget(index)  # again: its last words may have been an answer
            within_s = self._configs[index].api.start_timeout_s + _SPEAKS_LAST_S
            self._pulse.expect(index, time.monotonic() + within_s)
        channel = self._children.restart(index, epoch)
        self._memory.tell(channel, index, time.monotonic())
        self._children.listen(index, epoch)

    def _let_join(self, index: int) -> None:
        """It has loaded, and the engine cores have found it."""
        with self._lock:
            self._policy.take_ready(index, self._supervisor.epochs[index])
            self._pulse.take(index, time.monotonic())
            num_up = self._policy.num_up
        self._drop(index)  # again: what has just been compiled was nobody's to abort before
        self._children.tell(index, Serve())
        title = self._configs[index].title
        logger.info("%s is back; %d of %d answer", title, num_up, len(self._configs))

    def _drop(self, index: int) -> None:
        """Have the engine cores abort what an API server has left behind."""
        self._children.tell_others(index, Drop(index, self._dropped_before[index]))

    def _give_up(self, index: int, epoch: int, why: str) -> None:
        """End an API server that does not work any more; where it is replaced, only that."""
        cause = f"API server {self._children.name(index)} {why}"
        if self._ranks is None:
            self.mark_dead(None, cause, is_first=True)
        elif (index, epoch) not in self._given_up:
            self._given_up[index, epoch] = cause
            logger.error("first cause: %s", cause)
            self._supervisor.kill(index, epoch)
