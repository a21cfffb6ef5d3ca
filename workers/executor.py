"""Implements `engine.executor`: one process per rank, calls through one ring, replies through
another.

    engine core                        per rank
    main thread   --- broadcast ring (10 chunks) --->  worker
    follow thread <--- response ring (4 chunks) ----   worker

The engine core's thread writes calls and gets futures. A thread of ours follows what the workers
do: it parks on all response rings and on the ends of all worker processes at once, resolves
futures, and when something goes wrong decides, once, what the first cause was. From then on every
call and future fails with that cause, and the engine core is told.

Runs in the engine core, so imports no torch. `process` is the other side.
"""

import contextlib
import logging
import math
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

import zmq

from engine import lifecycle, run_log
from engine.config import EngineConfig
from engine.errors import ConfigError, ExecutorError, WireError
from engine.sockets import make_ipc_directory
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)
from workers import first_cause, process, rpc, shared_memory
from workers.death_signs import DeathSigns
from workers.pending_calls import PendingCall, PendingCalls
from workers.ring import MAX_READERS, Ring, RingWriter
from workers.shared_memory import NamelessFile
from workers.wakeup import Bell, Waiter
from workers.worker_handle import RESPONSE_CHUNKS, WorkerHandle

logger = logging.getLogger(__name__)

BROADCAST_CHUNKS = 10
"""An engine core gets at most so many calls ahead of its slowest worker."""

_CLOSE_S = 5.0
_CLOSE_AFTER_FAILURE_S = 0.5
"""Workers whose peer has failed may be stuck in a collective: they are asked, hardly waited for."""

_LOOK_UP_S = 1.0
"""How late a passed deadline may be noticed."""

_SETTLE_S = 0.05
"""How much later than the first sign of trouble the one that explains it may show."""

_GLANCE_S = 0.05


class _Closable(Protocol):
    def close(self) -> None: ...


Resource = TypeVar("Resource", bound=_Closable)


def start_executor(config: EngineConfig, on_failure: Callable[[str], None]) -> "MultiprocExecutor":
    """Start one process per rank. Call it on a thread that lives as long as the process: the kernel
    ends the workers with the thread that started them."""
    return MultiprocExecutor(config, on_failure)


class MultiprocExecutor:
    """The workers of one engine core.

    Args:
        config: settings of the engine core.
        on_failure: called once, with the first cause, from any thread; not for a ConfigError, which
            is the result of the call that it happens in.
        make_worker: makes a worker in its own process. A function or class of a module, so that
            child processes can import it.

    Raises:
        ConfigError: no memory for the rings, or a worker refuses the settings.
        ExecutorError: a worker has ended, or has not appeared in time.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_failure: Callable[[str], None],
        make_worker: process.MakeWorker = process.make_worker,
    ) -> None:
        self._config = config
        self._on_failure = on_failure
        self._pending = PendingCalls()
        self._encoder = rpc.encoder()
        self._decoder = rpc.reply_decoder()
        self._unsampled: int | None = None
        """Number of the call whose step awaits its masks."""
        self._warned_s = -math.inf
        self._replied_s = -math.inf
        self._failure: Exception | None = None
        self._failure_lock = threading.Lock()
        self._signs = DeathSigns()
        self._is_closing = threading.Event()
        self._follow_thread = threading.Thread(target=self._follow, name="workers", daemon=True)
        self._resources = contextlib.ExitStack()
        self._workers: list[WorkerHandle] = []
        self._stop_bell = self._keep(Bell.create())
        try:
            self._start(make_worker)
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------- Executor

    def load(self) -> Sequence[WorkerReport]:
        reports: list[WorkerReport] = self._call(rpc.load, self._start_patience_s())
        return reports

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        self._call(rpc.initialize_kv_cache(spec), self._start_patience_s())

    def execute(self, plan: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        assert self._unsampled is None, "a step still awaits its masks"
        if plan.awaits_masks:
            self._unsampled = self._calls.num_written
        call = rpc.execute_model(plan, self._config.parallel.output_rank)
        return self._send(call, self._config.executor.execute_timeout_s)

    def sample(self, masks: TokenMasks) -> None:
        assert self._unsampled is not None, "no step awaits masks"
        call = rpc.sample_tokens(masks, self._unsampled, self._config.parallel.output_rank)
        self._unsampled = None
        # Its reply is the step's: whatever goes wrong here is that future's exception.
        self._write(call, self._config.executor.execute_timeout_s)

    def statistics(self) -> Sequence[WorkerStats]:
        stats: list[WorkerStats] = self._call(
            rpc.statistics, self._config.executor.execute_timeout_s
        )
        return stats

    def profile(self, is_start: bool, directory: str) -> None:
        """Raises RequestFailedError, and the workers go on, if the profiler does not work."""
        self._call(rpc.profile(is_start, directory), self._config.executor.execute_timeout_s)

    def close(self) -> None:
        self._is_closing.set()
        if self._follow_thread.is_alive():
            self._stop_bell.ring()
            if self._follow_thread is not threading.current_thread():
                self._follow_thread.join(_CLOSE_S)
        self._pending.fail(ExecutorError("the executor is closed"))
        self._resources.close()

    # ------------------------------------------------------------------ start

    def _start(self, make_worker: process.MakeWorker) -> None:
        began_s = time.monotonic()
        self._start_deadline_s = began_s + self._config.executor.start_timeout_s
        folder = make_ipc_directory(self._config.executor.rpc_base_path)
        self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
        self._start_processes(make_worker, folder)
        self._open_wires()
        self._follow_thread.start()
        self._await_connections()
        shutil.rmtree(folder)  # nothing is left to find on disk, however we end
        logger.info(
            "workers started start_s=%.1f pids=%s",
            time.monotonic() - began_s,
            [worker.process.pid for worker in self._workers],
        )

    def _start_processes(self, make_worker: process.MakeWorker, folder: Path) -> None:
        chunk_bytes = _fit_chunk_bytes(self._config)
        num_workers = self._config.parallel.world_size
        rendezvous = self._keep(NamelessFile.create())
        self._ring = self._keep(
            Ring.create(
                num_chunks=BROADCAST_CHUNKS, chunk_bytes=chunk_bytes, num_readers=num_workers
            )
        )
        self._resources.callback(self._end_processes)
        for rank in range(num_workers):
            worker = WorkerHandle(
                self._config,
                rank,
                calls=self._ring,
                chunk_bytes=chunk_bytes,
                folder=folder,
                rendezvous=rendezvous,
                make_worker=make_worker,
                resources=self._resources,
            )
            self._workers.append(worker)

    def _open_wires(self) -> None:
        """Open our ends. After the processes have started: ZeroMQ does not survive a fork."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._resources.callback(context.term)
        for worker in self._workers:
            worker.open_wires(context)
        self._calls = RingWriter(
            self._ring,
            [worker.peer for worker in self._workers],
            [worker.calls_channel for worker in self._workers],
            self._config.executor.ring_warning_interval_s,
        )
        self._resources.callback(self._calls.close)  # the first that `close` does: ask
        self._waiter = Waiter(
            [self._stop_bell, *(worker.bell for worker in self._workers)],
            [worker.process.sentinel for worker in self._workers],
        )

    def _await_connections(self) -> None:
        while missing := [w.name for w in self._workers if not w.is_connected(_GLANCE_S)]:
            self._raise_failure()
            if time.monotonic() > self._start_deadline_s:
                timeout_s = self._config.executor.start_timeout_s
                self._fail(ExecutorError(f"no sign within {timeout_s:g} s of {', '.join(missing)}"))

    def _start_patience_s(self) -> float:
        """What is left of the one deadline for processes, weights and KV cache together."""
        return self._start_deadline_s - time.monotonic()

    def _keep(self, resource: Resource) -> Resource:
        return self._resources.enter_context(contextlib.closing(resource))

    def _end_processes(self) -> None:
        timeout_s = _CLOSE_S if self._failure is None else _CLOSE_AFTER_FAILURE_S
        processes = [worker.process for worker in self._workers]
        lifecycle.end_processes(processes, timeout_s)
        for ended in processes:
            with contextlib.suppress(ValueError):  # not even SIGKILL has ended it
                ended.close()

    # ------------------------------------------------------------------ calls

    def _call(self, call: rpc.Call, timeout_s: float) -> Any:
        """Make a call that the engine core waits for."""
        return self._send(call, timeout_s).result()

    def _send(self, call: rpc.Call, timeout_s: float) -> "Future[Any]":
        """Make a call and return its future. Whatever goes wrong is the future's exception."""
        ranks = range(len(self._workers)) if call.output_rank is None else [call.output_rank]
        pending = self._pending.add(call, self._calls.num_written, ranks, timeout_s)
        if not pending.future.done():
            self._write(call, timeout_s)
            pending.sent_s = time.monotonic()
        return pending.future

    def _write(self, call: rpc.Call, timeout_s: float) -> None:
        try:
            frames = self._encoder.encode(call)
            self._calls.write(frames, rpc.label(call), timeout_s=timeout_s)
        except BrokenPipeError:
            pass  # a worker has ended: the other thread knows, and is about to say why
        except (TimeoutError, WireError) as error:
            self._fail(ExecutorError(str(error)))

    # ------------------------------------------------------------------ the follow thread

    def _follow(self) -> None:
        """Take replies until the end, or until the first sign of trouble."""
        try:
            while not self._is_closing.is_set() and self._failure is None:
                has_death = self._waiter.wait(_LOOK_UP_S)
                failures = self._take_replies()
                if has_death or failures:
                    self._fail_with_first_cause(failures)
                else:
                    self._check_patience()
        except ExecutorError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the top of a thread that others wait for
            cause = f"replies cannot be followed: {type(error).__name__}: {error}"
            self._fail(ExecutorError(cause), traceback.format_exc())

    def _take_replies(self) -> dict[int, rpc.Failed]:
        """Hand in all replies that are there; return the reports of failures among them, by
        rank."""
        failures = {}
        for rank, worker in enumerate(self._workers):
            while (reply := self._next_reply(worker)) is not None:
                if isinstance(reply, rpc.Failed):
                    failures[rank] = reply
                else:
                    self._pending.accept(rank, reply)
                    self._replied_s = time.monotonic()
        return failures

    def _next_reply(self, worker: WorkerHandle) -> rpc.Reply | None:
        try:
            frames = worker.replies.try_read()
            return None if frames is None else self._decoder.decode(frames)
        except EOFError:  # it died half-way through a message: its sentinel tells
            return None
        except WireError as error:
            raise ExecutorError(f"{worker.name} sent what is no reply: {error}") from error

    def _check_patience(self) -> None:
        """Warn about the call that the workers are at, and give up when its time is over."""
        call, now_s = self._pending.oldest(), time.monotonic()
        interval_s = self._config.executor.ring_warning_interval_s
        if call is None:
            return
        # A call that was sent while another one ran begins when that has ended.
        waited_s = now_s - max(call.sent_s, self._replied_s)
        if waited_s < min(interval_s, call.timeout_s):
            return
        facts = f"{call.label} has no reply in {waited_s:.0f} s: {self._waits_for(call)}"
        if waited_s >= call.timeout_s:
            for rank in call.missing:
                run_log.ask_for_stacks(self._workers[rank].process.pid)
            self._fail(ExecutorError(facts))
        elif now_s - self._warned_s >= interval_s:  # not for each of the steps in flight
            self._warned_s = now_s
            logger.warning("%s", facts)

    def _waits_for(self, call: PendingCall) -> str:
        missing = " and ".join(self._workers[rank].name for rank in sorted(call.missing))
        # With tensor parallelism the rank that replies often only waits for one that lags behind.
        unread = " and ".join(self._calls.unread_by(call.number))
        return f"due from {missing}; {f'not read by {unread}' if unread else 'read by all'}"

    def _fail_with_first_cause(self, failures: dict[int, rpc.Failed]) -> None:
        self._is_closing.wait(_SETTLE_S)  # until the signs of what really happened are here too
        failures = {**self._take_replies(), **failures}
        deaths = {
            rank: exit_code
            for rank, worker in enumerate(self._workers)
            if (exit_code := worker.process.exitcode) is not None
        }
        for dead, exit_code in deaths.items():
            title = f"Worker_{process.rank_name(self._config.parallel, dead)}"
            pid = self._workers[dead].process.pid
            run_log.record("exit", process=title, pid=pid, exit_code=exit_code)
        if not deaths and not failures:
            return  # a process is ending; it has an exit code the next time
        rank = first_cause.choose(deaths, failures)
        name = f"{self._workers[rank].name} node={socket.gethostname()}"
        failed = failures.get(rank)
        if failed is None:
            signs = self._signs.of_exit(deaths[rank])
            self._fail(ExecutorError(f"{name} {_ended(deaths[rank])} {self._when(rank)}{signs}"))
        elif failed.kind == "config":
            self._fail(ConfigError(failed.message))
        else:
            signs = self._signs.of_error(failed.message)
            cause = f"{name} failed in {failed.doing}: {failed.message}{signs}"
            self._fail(ExecutorError(cause), failed.traceback)

    def _when(self, rank: int) -> str:
        """What a worker that has ended had been at."""
        if (last := self._calls.last_read_by(rank)) is None:
            return "during start"
        return f"during {last}" if self._pending.oldest() else f"after {last}"

    # ------------------------------------------------------------------ failure

    def _fail(self, error: ConfigError | ExecutorError, traceback_text: str = "") -> None:
        """Make this the end, unless there was one before."""
        with self._failure_lock:
            if self._failure is not None or self._is_closing.is_set():
                return
            self._failure = error
        if isinstance(error, ExecutorError):
            lifecycle.log_end_of_rank(
                f"{error}{traceback_text and chr(10)}{traceback_text}",
                is_first=self._config.wire.tells_first_cause,
            )
        self._pending.fail(error)
        if isinstance(error, ExecutorError):
            self._on_failure(error.cause)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _ended(exit_code: int) -> str:
    end = lifecycle.describe_exit(exit_code)
    return end if exit_code < 0 else f"ended with {end}"


def _fit_chunk_bytes(config: EngineConfig) -> int:
    """Bytes of a chunk in all rings of this engine core."""
    num_workers = config.parallel.world_size
    if num_workers > MAX_READERS:
        raise ConfigError(
            f"{num_workers} workers in one engine core (tensor × pipeline parallel size): a ring"
            f" has at most {MAX_READERS} readers"
        )
    wanted = config.executor.ring_chunk_bytes
    num_chunks = BROADCAST_CHUNKS + RESPONSE_CHUNKS * num_workers
    room = shared_memory.room_for_rings(config.executor.num_local_engines)
    fitting = shared_memory.fit_chunk_bytes(wanted, num_chunks, room)
    if fitting < wanted:
        logger.warning(
            "ring chunks shrink from %.1f to %.1f MiB: %d of them may take %.0f MiB together",
            *(wanted / 2**20, fitting / 2**20, num_chunks, room / 2**20),
        )
    return fitting
