"""ENTRY of an engine process: an input thread, an output thread, and the core's loop between them.

    API servers --DEALER--> input thread --inbox--> core loop --outbox--> output thread --PUSH-->
                                         --aborts->     ^
                     executor's monitor --inbox---------+

The main thread touches only in-memory queues. What runs is decided in `core`; here is told when
what begins and how it ends:

    1. start the workers; from then on heartbeats say LOADING,
    2. load the model, size and allocate the KV cache, freeze the heap,
    3. READY to every API server; requests flow,
    4. loop, until the parent says stop (`lifecycle.STOP_SIGNAL`, or `stop` where the core is part
       of a Ray actor, `cluster/actors.py`) or something fails,
    5. DEAD with the cause to every API server, end the workers, exit.

Exit codes: 2 for settings that cannot work (DEAD carries the message), 1 for a failure (the first
cause is in the log), and death by the stop signal where that ended it.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import zmq

from engine import fingerprint, lifecycle, log, run_log
from engine.config import EngineConfig, WireConfig
from engine.core import EngineCore
from engine.core_loop import CoreLoop
from engine.curve import CurveKeys, CurveLink
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, ExecutorError, FencedError
from engine.executor import Executor, StartExecutor
from engine.grammar.compiler import Compiler
from engine.inbox import AbortQueue, ExecutorFailed, Inbox, ThreadCrashed
from engine.input_thread import InputThread
from engine.output_thread import OutputThread, Progress
from engine.sockets import DEAD_LINGER_MS, STOPPED_LINGER_MS
from engine.thinning import ThinnedCount
from engine.wire import EngineReady, Phase, sendable

logger = logging.getLogger(__name__)

STOPPED = "stopped by its parent"

MAX_CAUSE_CHARS = 2000
"""Of a cause in DEAD: enough for a message, whatever an exception's text holds."""


def main(
    config: EngineConfig, start_executor: StartExecutor, keys: CurveKeys | None = None
) -> NoReturn:
    """Run one engine core until it is stopped or fails. The target of `multiprocessing`."""
    name = f"EngineCore_DP{config.parallel.data_parallel_rank}"
    lifecycle.set_title(name)
    log.configure(name, config.log_level)
    run_log.keep(config.run_folder, name)
    is_first = config.parallel.data_parallel_rank == config.parallel.data_parallel_start_rank
    lifecycle.die_with_parent(at_once=False, is_first_to_know=is_first)
    lifecycle.leave_stopping_to_parent()
    exit_code = EngineProcess(config, keys).run(
        start_executor, interrupted_by=lifecycle.STOP_SIGNAL
    )
    if exit_code == -lifecycle.STOP_SIGNAL:
        lifecycle.die_of(lifecycle.STOP_SIGNAL)
    lifecycle.flush_streams()
    sys.exit(exit_code)


class _Stopped(BaseException):
    """The stop signal, raised in the main thread wherever that is: loading may take minutes."""


class EngineProcess:
    """One engine core with its threads and sockets; `run` is its whole life.

    Args:
        config: settings.
        keys: its own, where `config.wire.curve` is given. Servers have listed the public one by the
            time it runs.
    """

    def __init__(self, config: EngineConfig, keys: CurveKeys | None = None) -> None:
        self._config = config
        self._links = _links(config.wire, keys)
        self._engine_index = config.parallel.engine_index
        self._inbox: Inbox = queue.SimpleQueue()
        self._aborts: AbortQueue = queue.SimpleQueue()
        self._dropped = ThinnedCount()
        self._began = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._executor: Executor | None = None
        self._input: InputThread | None = None
        self._output: OutputThread | None = None
        self._core: EngineCore | None = None
        self._loop: CoreLoop | None = None
        self._is_stopped = False

    def run(
        self, start_executor: StartExecutor, interrupted_by: signal.Signals | None = None
    ) -> int:
        """Start, loop, end. On a thread that lives as long as the process (`start_executor`).

        Args:
            start_executor: starts the workers.
            interrupted_by: ends it too, at once, whatever it is doing. Main thread only.

        Returns:
            The exit code; minus STOP_SIGNAL after a stop, however it was asked for.
        """
        try:
            with self._interruptible(interrupted_by):
                loop = self._start(start_executor)
                if not self._is_stopped:
                    loop.run()
            cause, exit_code = STOPPED, -lifecycle.STOP_SIGNAL
        except _Stopped:
            cause, exit_code = STOPPED, -lifecycle.STOP_SIGNAL
        except ConfigError as error:
            cause, exit_code = str(error), EXIT_CONFIG
        except ExecutorError as error:
            cause, exit_code = error.cause, EXIT_FAILED  # the executor has logged the first cause
        except FencedError as error:
            cause, exit_code = str(error), EXIT_FAILED
            logger.warning("ending: %s", cause)
        except Exception as error:  # noqa: BLE001 - the top of the process
            cause, exit_code = self._describe(error), EXIT_FAILED
            lifecycle.log_end_of_rank(
                f"{cause}\n{traceback.format_exc()}", is_first=self._config.wire.tells_first_cause
            )
        # Who stops us knows why, and may have closed its socket by now.
        self._end(
            cause,
            STOPPED_LINGER_MS if exit_code < 0 else DEAD_LINGER_MS,
            is_told=exit_code != EXIT_FAILED or self._config.wire.tells_first_cause,
        )
        return exit_code

    def stop(self) -> None:
        """End `run` after the step under way, or when the model has loaded: a load is not cut
        short. From any thread."""
        self._is_stopped = True
        if self._loop is not None:
            self._loop.stop()

    def _interruptible(self, signum: signal.Signals | None) -> AbstractContextManager[None]:
        if signum is None:
            return contextlib.nullcontext()
        return lifecycle.interrupted_by(signum, self._interrupt)

    def _start(self, start_executor: StartExecutor) -> CoreLoop:
        # The workers first: where they are forked, they must not inherit threads or ZeroMQ.
        self._executor = start_executor(self._config, self._report_executor_failure)
        output = self._start_output()
        core = self._core = EngineCore(
            self._config, self._executor, num_dropped_messages=lambda: self._dropped.count
        )
        self._input = InputThread(
            self._zmq(),
            self._config.wire.request_addresses,
            links=self._links,
            coordinator_index=self._config.wire.coordinator_index,
            ready=self._ready(core),
            prepare=core.prepare,
            dropped=self._dropped,
            inbox=self._inbox,
            aborts=self._aborts,
            reply=output.put,
            on_crash=lambda error: self._inbox.put(ThreadCrashed("input", error)),
            compiler=Compiler(Path(self._config.model.path), core.vocab_size),
        )
        self._loop = CoreLoop(
            core,
            self._inbox,
            self._aborts,
            put=output.put,
            engine_index=self._engine_index,
            epoch=self._config.wire.epoch,
            num_clients=len(self._config.wire.output_addresses),
            coordinator_index=self._config.wire.coordinator_index,
        )
        lifecycle.freeze_heap()
        self._input.start()
        return self._loop

    def _start_output(self) -> OutputThread:
        wire = self._config.wire
        self._output = OutputThread(
            self._zmq(),
            wire.output_addresses,
            links=self._links,
            engine_index=self._engine_index,
            epoch=wire.epoch,
            heartbeat_interval_s=wire.heartbeat_interval_s,
            progress=self._progress,
            on_crash=lambda error: self._inbox.put(ThreadCrashed("output", error)),
        )
        self._output.start()
        return self._output

    def _ready(self, core: EngineCore) -> EngineReady:
        slowest = core.slowest
        ready = EngineReady(
            engine_index=self._engine_index,
            epoch=self._config.wire.epoch,
            max_model_len=core.max_model_len,
            num_gpu_blocks=core.num_gpu_blocks,
            block_size=core.block_size,
            kv_cache_size_tokens=core.kv_cache_size_tokens,
            dtype=core.dtype,
            vocab_size=core.vocab_size,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            fingerprint=fingerprint.take(self._config.model.path, self._config.model.quantization),
            load_s=time.monotonic() - self._began,
            imports_s=slowest.imports_s,
            weights_s=slowest.load_s - slowest.imports_s - slowest.kernels_s,
            kernels_s=slowest.kernels_s,
            kv_cache_s=core.kv_cache_s,
            has_prefix_cache=self._config.cache.enable_prefix_caching,
        )
        logger.info(
            "engine ready num_gpu_blocks=%d max_model_len=%d load_s=%.1f",
            ready.num_gpu_blocks,
            ready.max_model_len,
            ready.load_s,
        )
        return ready

    def _end(self, cause: str, linger_ms: int, *, is_told: bool) -> None:
        """Tell the API servers, end the workers, then threads and sockets."""
        # Any other cause is logged by now, or said by the command: DEAD takes it there.
        logger.info("engine core ends%s", f": {cause}" if cause == STOPPED else "")
        if self._input is not None:
            self._input.close()
        try:
            output = self._output or self._start_output()
            last_words = sendable(cause)[:MAX_CAUSE_CHARS]
            has_ended = output.finish(last_words, linger_ms, is_told=is_told)
        finally:
            if self._executor is not None:
                self._executor.close()
        if has_ended:
            self._zmq().term()  # ends the input thread, and waits until DEAD has left

    def _interrupt(self) -> None:
        # An exception from a handler is lost if it hits a finalizer; then the flag is seen.
        self.stop()
        raise _Stopped

    def _zmq(self) -> "zmq.Context[zmq.Socket[bytes]]":
        if self._context is None:
            self._context = zmq.Context()
        return self._context

    def _progress(self) -> Progress:
        """What heartbeats say. Called on the output thread."""
        core = self._core
        if core is None:
            return Progress(Phase.LOADING, self._began, 0)
        return Progress(core.phase, core.phase_began, core.num_steps)

    def _describe(self, error: Exception) -> str:
        """What an operator needs of a bug of ours: which process, what it was at, and what
        happened."""
        phase, _, num_steps = self._progress()
        rank = self._config.parallel.data_parallel_rank
        return (
            f"EngineCore_DP{rank} pid={os.getpid()} node={socket.gethostname()} failed in step"
            f" {num_steps}, {phase.name}: {type(error).__name__}: {error}"
        )

    def _report_executor_failure(self, cause: str) -> None:
        self._inbox.put(ExecutorFailed(cause))


def _links(wire: WireConfig, keys: CurveKeys | None) -> list[CurveLink]:
    """What to connect with, by client index; nothing on ipc."""
    if wire.curve is None:
        return []
    assert keys is not None, "encrypted wires need keys"
    assert len(wire.curve.server_public_keys) == len(wire.request_addresses)
    return [CurveLink(keys, public) for public in wire.curve.server_public_keys]
