"""DP coordinator: what each rank has to do, and the waves of lock-step ranks. Pure: messages and
times in, messages out.

    engine cores  --READY, load, waves, DEAD-->  coordinator  --StartWave--->  engine cores
    API servers   --FirstRequest-------------->               --LoadReport-->  API servers

Every report holds the whole state, so a lost one does no harm. About waves the ranks know best
(`engine/waves.py`): one that gets a request while it is paused starts by itself and says so. The
coordinator wakes the others, and rather repeats what a rank may have missed than guess who knows:

- A wave is started once, for the first who asks. What is said of an earlier one is late news.
- Every rank says when a wave is over, and the first to say so is believed.
- A first request wakes its own rank too: that may have refused it, and the others would wait.
- When a rank joins while there are waves, all are woken once more, and again after that wave, which
  may have ended without the new one. A wave without work ends at once.

A coordinator that replaces another knows nobody: READY has been said to the one before. Then the
ranks' heartbeats introduce them, and one that is idle has no load. The wave is that of the first
rank to speak of one.

Used by `coordinator_process`, which has the sockets and the clock.
"""

import math
from typing import NamedTuple

from engine.errors import WireError
from engine.wire import (
    EngineCoreOutputs,
    EngineDead,
    EngineLoad,
    FirstRequest,
    Heartbeat,
    LoadReport,
    Phase,
    SchedulerStats,
    StartWave,
)

MIN_REPORT_INTERVAL_S = 0.1
"""Changes of load are collected for as long: ten reports a second, whatever the ranks say."""

MAX_REPORT_INTERVAL_S = 1.0
"""A report comes this often though nothing has changed: silence means that nobody is there."""


class Start(NamedTuple):
    """START_DP_WAVE for one rank."""

    engine_index: int
    epoch: int
    message: StartWave


class Coordinator:
    """What is known of one server's ranks. Times are of any one clock that does not jump.

    Args:
        num_engines: engine cores of this server.
        is_successor: of another, to which they have said READY.
    """

    def __init__(self, num_engines: int, *, is_successor: bool = False) -> None:
        self.wave = 0
        """The wave under way, or the next one."""
        self.is_running = False
        self.num_stale_messages = 0
        """Messages of incarnations that are gone, dropped."""
        self.report_due_at = -math.inf
        """When `take_report` has the next one."""
        self._num_engines = num_engines
        self._is_successor = is_successor
        self._epochs = [0] * num_engines
        """The latest incarnation of each rank that has been heard of."""
        self._ready: dict[int, int] = {}
        """Epoch of each rank that can be written to."""
        self._loads: dict[int, EngineLoad] = {}
        self._must_repeat = False
        """Whether the wave under way may end without a rank that runs it."""
        self._reported_at = -math.inf

    # ----------------------------------------------------------------------- from engine cores

    def take_ready(self, engine_index: int, epoch: int) -> list[Start]:
        """READY: the rank can be written to from now on."""
        if self._is_stale(engine_index, epoch):
            return []
        self._ready[engine_index] = epoch
        self.hasten_report()
        if not self.is_running and self.wave == 0:
            return []
        self._must_repeat = True
        return self._start(self.wave)

    def take_heartbeat(self, heartbeat: Heartbeat) -> list[Start]:
        """HEARTBEAT: news to a successor only. One that loads will say READY, and one that works
        tells its load with its steps."""
        index, epoch = heartbeat.engine_index, heartbeat.epoch
        if not self._is_successor or heartbeat.phase is Phase.LOADING:
            return []
        if self._is_stale(index, epoch):
            return []
        if heartbeat.phase is Phase.IDLE and index not in self._loads:
            self._take_load(index, epoch, SchedulerStats(0, 0, 0.0))
        return [] if index in self._ready else self.take_ready(index, epoch)

    def take_outputs(self, outputs: EngineCoreOutputs) -> list[Start]:
        """OUTPUTS: a rank's load, the end of a wave, or that it has started one."""
        if self._is_stale(outputs.engine_index, outputs.epoch):
            return []
        if outputs.stats is not None:
            self._take_load(outputs.engine_index, outputs.epoch, outputs.stats)
        starts: list[Start] = []
        if outputs.wave_complete is not None:
            starts += self._end(outputs.wave_complete)
        if outputs.start_wave is not None:
            starts += self._ask(outputs.start_wave, knows=outputs.engine_index)
        return starts

    def take_dead(self, dead: EngineDead) -> None:
        """DEAD: that incarnation will not be heard of again."""
        if not self._is_stale(dead.engine_index, dead.epoch):
            self._replace(dead.engine_index, dead.epoch + 1)

    # ------------------------------------------------------------------------ from API servers

    def take_first_request(self, first: FirstRequest) -> list[Start]:
        """FIRST_REQUEST: quicker than the rank's own word, which comes after it."""
        self._check(first.engine_index)
        return self._ask(first.wave)

    # -------------------------------------------------------------------------- to API servers

    def take_report(self, now: float) -> LoadReport | None:
        """The next report, if it is due. A rank is in it once both of its wires to us work: an API
        server that waits for all of them knows that the server is complete."""
        if now < self.report_due_at:
            return None
        self._reported_at, self.report_due_at = now, now + MAX_REPORT_INTERVAL_S
        loads = [load for index, load in sorted(self._loads.items()) if index in self._ready]
        return LoadReport(loads, self.wave, self.is_running)

    def hasten_report(self) -> None:
        """Something has changed, or somebody has come who knows nothing yet."""
        self.report_due_at = min(self.report_due_at, self._reported_at + MIN_REPORT_INTERVAL_S)

    # --------------------------------------------------------------------------------- the rest

    def _take_load(self, engine_index: int, epoch: int, stats: SchedulerStats) -> None:
        load = EngineLoad(
            engine_index,
            epoch,
            stats.num_waiting,
            stats.num_running,
            stats.kv_cache_usage,
            stats.num_by_client,
        )
        if load != self._loads.get(engine_index):
            self._loads[engine_index] = load
            self.hasten_report()

    def _ask(self, wave: int, knows: int | None = None) -> list[Start]:
        """Somebody wants `wave` to run; rank `knows` runs it already."""
        if wave < self.wave or (wave == self.wave and self.is_running):
            return []
        return self._start(wave, knows)

    def _start(self, wave: int, knows: int | None = None) -> list[Start]:
        self._set_wave(wave, is_running=True)
        message = StartWave(wave, knows)
        return [
            Start(index, epoch, message) for index, epoch in self._ready.items() if index != knows
        ]

    def _end(self, wave: int) -> list[Start]:
        if wave < self.wave:
            return []
        self._set_wave(wave + 1, is_running=False)
        if not self._must_repeat:
            return []
        self._must_repeat = False
        return self._start(self.wave)

    def _set_wave(self, wave: int, *, is_running: bool) -> None:
        self.wave, self.is_running = wave, is_running
        self.report_due_at = -math.inf  # API servers should know at once

    def _is_stale(self, engine_index: int, epoch: int) -> bool:
        """Whether to drop what this incarnation says. The first word of a new one replaces the
        old."""
        self._check(engine_index)
        if epoch < self._epochs[engine_index]:
            self.num_stale_messages += 1
            return True
        if epoch > self._epochs[engine_index]:
            self._replace(engine_index, epoch)
        return False

    def _replace(self, engine_index: int, epoch: int) -> None:
        self._epochs[engine_index] = epoch
        self._ready.pop(engine_index, None)
        if self._loads.pop(engine_index, None) is not None:
            self.hasten_report()

    def _check(self, engine_index: int) -> None:
        if engine_index >= self._num_engines:
            raise WireError(f"a message of or for unknown engine {engine_index}")
