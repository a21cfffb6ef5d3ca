"""The main loop of an engine process, between its in-memory queues: take, step, hand out.

    inbox  -->  take  -->  core.step  -->  hand out  -->  outbox
    aborts  ----------------^ right after each forward pass

Where steps are planned while one runs, the core takes what has come since once more, just before.

Used by `process`, on the main thread; knows no sockets and no threads. It sleeps on the inbox
while the core has no work, so an idle engine core costs nothing.
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import assert_never

from engine import utility
from engine.core import EngineCore
from engine.errors import ExecutorError, FencedError, RequestFailedError
from engine.inbox import (
    Abort,
    AbortQueue,
    Add,
    Call,
    ExecutorFailed,
    Fenced,
    Inbox,
    Item,
    ThreadCrashed,
    Wakeup,
    Wave,
)
from engine.utility import NO_PROFILER, Statistics
from engine.wire import EngineCoreOutputs, Phase, SchedulerStats, UtilityCall, UtilityOutput

STATS_INTERVAL_S = 0.5
"""The load is told this often while the core works, also to those whose requests get nothing; and
at once when the number of waiting or running requests changes."""


class CoreLoop:
    """Drives one core until `stop` is called or an exception ends it.

    Args:
        put: sends outputs to an API server, by client index. Never blocks.
        num_clients: API servers, and the coordinator.
        coordinator_index: which client is the coordinator. It is told of the load before each step
            that changes it, and when there is no more to do; API servers hear of it from there,
            unless they get outputs. None: there is none, and each API server is told.
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox,
        aborts: AbortQueue,
        *,
        put: Callable[[int, EngineCoreOutputs], None],
        engine_index: int,
        epoch: int,
        num_clients: int,
        coordinator_index: int | None = None,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._aborts = aborts
        self._put = put
        self._engine_index = engine_index
        self._epoch = epoch
        self._num_clients = num_clients
        self._coordinator_index = coordinator_index
        self._target = _CoreTarget(core)
        self._load: tuple[int, ...] = ()
        self._stats_due_at = 0.0
        self._is_stopped = False

    def stop(self) -> None:
        """End `run` after the step under way. From any thread, or a signal handler."""
        self._is_stopped = True
        self._inbox.put(Wakeup())

    def run(self) -> None:
        """Loop until stopped.

        Raises:
            ExecutorError: the workers have failed.
            FencedError: another incarnation of this rank takes its place.
            Exception: any other fault of the core, or of a thread of its process.
        """
        while not self._is_stopped:
            self._take()
            if self._core.has_work():
                self._tell_coordinator()
                self._hand_out(self._core.step(self._drain_aborts, self._take_all))

    def _take(self) -> None:
        """Handle all that has come; where there is no work, wait for something to come."""
        if not self._core.has_work():
            self._core.enter(Phase.IDLE)
            self._tell_coordinator()
            self._handle(self._inbox.get())
        self._take_all()

    def _take_all(self) -> None:
        while not self._inbox.empty():
            self._handle(self._inbox.get_nowait())

    def _handle(self, item: Item) -> None:
        match item:
            case Add(request):
                self._core.add(request)
            case Abort(request_ids):
                self._core.abort(request_ids)
                if not self._core.has_work():
                    self._drain_aborts()  # no forward pass will, until there is work again
            case Call(call):
                self._answer(call)
            case Fenced(epoch):
                if epoch >= self._epoch:
                    raise FencedError(f"the server has given up epoch {epoch} of this rank")
            case ExecutorFailed(cause):
                raise ExecutorError(cause)
            case ThreadCrashed(thread, error):
                raise RuntimeError(f"the {thread} thread has crashed: {error!r}") from error
            case Wave() | Wakeup():
                pass  # NOTE: ranks of a dense model are independent and step in no waves.
            case _:
                assert_never(item)

    def _drain_aborts(self) -> None:
        while not self._aborts.empty():
            self._core.abort(self._aborts.get_nowait())

    def _answer(self, call: UtilityCall) -> None:
        self._core.enter(Phase.UTILITY)
        self._put(call.client_index, self._outputs(utility=utility.answer(call, self._target)))

    def _hand_out(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client_index, batch in outputs.items():
            self._put(client_index, batch)
        if self._coordinator_index is None and self._is_load_due():
            message = self._outputs(stats=self._core.stats())
            for client_index in range(self._num_clients):
                if client_index not in outputs:
                    self._put(client_index, message)

    def _tell_coordinator(self) -> None:
        # Before the step, which may take long: others should know by then what has come.
        if self._coordinator_index is not None and self._is_load_due():
            self._put(self._coordinator_index, self._outputs(stats=self._core.stats()))

    def _is_load_due(self) -> bool:
        load, now = self._core.load(), time.monotonic()
        if load == self._load and now < self._stats_due_at:
            return False
        self._load, self._stats_due_at = load, now + STATS_INTERVAL_S
        return True

    def _outputs(
        self, *, stats: SchedulerStats | None = None, utility: UtilityOutput | None = None
    ) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            self._engine_index,
            self._epoch,
            stats=stats,
            timestamp=time.monotonic(),
            utility=utility,
        )


class _CoreTarget:
    """Implements `utility.Target`."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._profile_directory: str | None = None

    def statistics(self) -> Statistics:
        return Statistics(self._core.stats(), list(self._core.executor.statistics()))

    def reset_prefix_cache(self) -> bool:
        return self._core.reset_prefix_cache()

    def profile(self, is_start: bool, directory: str) -> None:
        if is_start and self._profile_directory is not None:
            raise RequestFailedError(f"the profiler runs already, into {self._profile_directory}")
        if not is_start and self._profile_directory is None:
            raise RequestFailedError(NO_PROFILER)
        if is_start:
            with contextlib.suppress(OSError):
                os.makedirs(directory, exist_ok=True)
        # Checked here, because a worker that cannot write its trace ends the engine core.
        if not os.path.isdir(directory) or not os.access(directory, os.W_OK):
            raise RequestFailedError(f"{directory} is no folder that can be written to")
        if is_start:
            self._start_profile(directory)
        else:
            # Forgotten first: a rank that cannot write its trace has stopped all the same.
            self._profile_directory = None
            self._core.executor.profile(False, directory)

    def drop_client(self, client_index: int, arrived_before: float) -> int:
        return self._core.drop_client(client_index, arrived_before)

    def _start_profile(self, directory: str) -> None:
        try:
            self._core.executor.profile(True, directory)
        except RequestFailedError:
            # Some ranks may have started, and nobody will stop a profiler that does not run.
            with contextlib.suppress(RequestFailedError):
                self._core.executor.profile(False, directory)
            raise
        self._profile_directory = directory
