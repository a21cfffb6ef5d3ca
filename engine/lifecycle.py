"""How our processes start and end: die with the parent, stop on signals, wait with a deadline.

No process of ours outlives its parent, also when that one is killed with SIGKILL, also while a
model loads: a thread watches multiprocessing's own pipe to the parent, and where that may be too
slow (a long call into C that keeps the interpreter lock) the kernel sends SIGKILL by itself.
"""

import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from multiprocessing import connection, parent_process, process
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NoReturn, ParamSpec, TypeVar

import setproctitle

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

STOP_SIGNAL = signal.SIGUSR1
"""How a parent asks its engine core to end. Not SIGTERM: `timeout`, systemd and container runtimes
send that to every process of a group, and only the API server, which drains, may act on it."""

_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What reaches a whole process group at once, from a terminal, also one that closes, or from a
supervisor."""

_PR_SET_PDEATHSIG = 1


def set_title(name: str) -> None:
    """Show this process in `ps` as `RAYWIRE::name`."""
    setproctitle.setproctitle(f"RAYWIRE::{name}")


def die_with_parent(*, at_once: bool, is_first_to_know: bool = False) -> None:
    """Make this child process end when its parent does. Among the first calls in every
    child.

    Args:
        at_once: the kernel kills us with the parent's thread, also inside a long call into C. False
            leaves it to the watching thread, which has time to log the cause: for processes that
            never hold the interpreter lock for long, and whose parent's thread may end before it.
        is_first_to_know: of all children the one that logs the death as the first cause.
    """
    parent = parent_process()
    if parent is None:
        return
    # SIGCONT wakes a process that was stopped, so that its watching thread can act.
    die_with_starter(signal.SIGKILL if at_once else signal.SIGCONT)
    if sys.platform == "linux" and at_once and os.getppid() != parent.pid:
        os._exit(1)  # it died before the call above
    threading.Thread(
        target=_watch,
        args=(parent.sentinel, parent.pid, is_first_to_know),
        name="parent-watch",
        daemon=True,
    ).start()


def die_with_starter(signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that has started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)


def _watch(sentinel: int, parent_pid: int | None, is_first_to_know: bool) -> None:
    connection.wait([sentinel])
    level, prefix = (logging.ERROR, "first cause: ") if is_first_to_know else (logging.INFO, "")
    logger.log(level, "%sparent process pid=%s is gone; ending with it", prefix, parent_pid)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def in_lasting_thread(function: Callable[[], T]) -> "Iterator[Future[T]]":
    """Run `function` in a thread that lives as long as the block: children which it starts ask the
    kernel to end them with the thread that started them."""
    result: Future[T] = Future()
    is_over = threading.Event()

    def run_and_stay() -> None:
        result.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001  # handed to whoever waits, who raises it
            result.set_exception(error)
        else:
            result.set_result(value)
        is_over.wait()

    threading.Thread(target=run_and_stay, name="start", daemon=True).start()
    try:
        yield result
    finally:
        is_over.set()


class StopFlag:
    """Set by the first signal. `count` says how many came: a second one means at once.

    To be looked at: a handler must not take a lock that the main thread may hold. Who would rather
    be woken says how in `on_set`, which is called in the handler and must not take one either.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_set: Callable[[], object] | None = None

    @property
    def is_set(self) -> bool:
        return self.count > 0

    def set(self) -> None:
        self.count += 1
        if self.on_set is not None:
            self.on_set()


def is_hangup_ignored(signum: signal.Signals) -> bool:
    return signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN


@contextlib.contextmanager
def stop_on_signals(*signals: signal.Signals) -> Iterator[StopFlag]:
    """Turn signals into a flag while the block runs. Main thread only.

    Args:
        signals: by default those that reach a whole process group. A SIGHUP that was ignored stays
            so: `nohup` is meant.
    """
    stop = StopFlag()
    chosen = signals or tuple(s for s in _GROUP_SIGNALS if not is_hangup_ignored(s))

    def handle(signum: int, frame: FrameType | None) -> None:
        stop.set()

    before = {s: signal.signal(s, handle) for s in chosen}
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@contextlib.contextmanager
def interrupted_by(signum: signal.Signals, handle: Callable[[], None]) -> Iterator[None]:
    """Call `handle` in the main thread, at once, at the first such signal inside the block; it may
    raise. Later ones, also after the block, are ignored. Main thread only.

    Python's own handler is not enough: a signal that comes in the instant before the main thread
    blocks on a lock goes unnoticed until that lock is free. So a thread, told by Python's signal
    pipe, repeats the signal until it has been noticed.
    """
    main_thread = threading.get_ident()
    is_noticed = False

    def on_signal(_: int, frame: FrameType | None) -> None:
        nonlocal is_noticed
        if not is_noticed:
            is_noticed = True
            signal.signal(signum, signal.SIG_IGN)
            handle()

    def repeat() -> None:
        while (came := os.read(reader, 1)) and came[0] != signum:
            pass
        while came and not is_noticed:
            signal.pthread_kill(main_thread, signum)
            time.sleep(0.02)
        os.close(reader)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=repeat, name="signal-watch", daemon=True).start()
    signal.signal(signum, on_signal)
    former = signal.set_wakeup_fd(writer)
    try:
        yield
    finally:
        signal.signal(signum, signal.SIG_IGN)
        is_noticed = True
        signal.set_wakeup_fd(former)
        os.close(writer)  # ends the thread


# A forked child would report its signals into its parent's pipe.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
# At its end it would try to join its parent's children, and fail with a traceback.
os.register_at_fork(after_in_child=lambda: process._children.clear())  # type: ignore[attr-defined]


def die_of(signum: signal.Signals) -> NoReturn:
    """End by the signal that stopped us: the parent sees it, and knows whether it was its own."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    raise AssertionError("we are dead")


def leave_stopping_to_parent() -> None:
    """Ignore SIGINT and SIGTERM: they come to the whole group, and the parent stops its children in
    order. For child processes."""
    for signum in _GROUP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def group_signals_held_back() -> Iterator[None]:
    """Start children with SIGINT and SIGTERM blocked. They inherit the mask, so there is no moment
    in which what was sent to the group ends a child that its parent still needs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def freeze_heap() -> None:
    """Take what lives as long as this process out of the garbage collector's sight: a full
    collection with a model in memory takes tens of milliseconds, in the middle of a step. And give
    back to the system what loading has left: the C library keeps what was freed, after reading a
    tokenizer of 262,144 tokens two thirds of 300 MiB."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)


def flush_streams() -> None:
    """Write out what was said, before an end. What cannot be written, as the log's disk is full, is
    lost: Python would try once more, fail, and change the exit code that has been decided."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def ask_to_end(process: BaseProcess) -> None:
    """Send STOP_SIGNAL, if there is a process to take it."""
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, STOP_SIGNAL)


def end_processes(processes: Iterable[BaseProcess], timeout_s: float) -> None:
    """Wait for child processes that were asked to end, then kill them. Returns when all are
    gone."""
    alive = [p for p in processes if p.pid is not None]
    for is_over, patience_s in ((False, timeout_s), (True, 5.0)):
        if is_over:
            for process in alive:
                process.kill()
        deadline = time.monotonic() + patience_s
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [p for p in alive if p.is_alive()]
        if not alive:
            return
    logger.error("processes survive SIGKILL pids=%s", [p.pid for p in alive])


def here_only(function: Callable[P, object]) -> Callable[P, None]:
    """`function` for this process, nothing in a fork of it: there, too, finalizers run, and would
    end what belongs to the parent."""
    pid = os.getpid()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.getpid() == pid:
            function(*args, **kwargs)

    return call


def log_end_of_rank(cause: str, *, is_first: bool) -> None:
    """Log why an engine core cannot go on, from within it.

    Args:
        cause: with its traceback, if there is one.
        is_first: whether it is a first cause, as far as this core can tell
            (`WireConfig.tells_first_cause`). Else it is for the server to say.
    """
    if is_first:
        logger.error("first cause: %s", cause)
    else:
        logger.warning("this rank ends: %s", cause)


def describe_exit(exit_code: int | None) -> str:
    """An exit code as an operator reads it: `exit code 3`, `killed by SIGKILL`."""
    if exit_code is None:
        return "still running"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
