"""Starts child processes of this server on this node, watches them, ends them.

Used for engine cores and the coordinator (`local_engines`, `library`) and for API servers
(`api_servers`). A thread waits on the children's sentinels; what a death means is decided by
`judge`, which is pure. Workers are not watched here: they are their engine core's children, and its
executor reports them.

A child that has ended, or is to end, can be followed by another under its number (`restart`). Which
of them is meant says the epoch.
"""

import logging
import multiprocessing
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess

from cluster.environment import StartMethod
from cluster.process_group import end_group, lead_group
from engine import run_log
from engine.errors import EXIT_CONFIG, ServerError
from engine.lifecycle import (
    ask_to_end,
    describe_exit,
    end_processes,
    group_signals_held_back,
)
from workers.death_signs import DeathSigns

logger = logging.getLogger(__name__)

_STACKS_S = 0.1
"""How long a process that is about to be killed may take to say where it stands."""

_LAST_WORDS_S = 2.0
"""How long a child's message that says why it ends may take after its process is gone."""

_KILL_S = 5.0
"""How long a child that is killed may take to be gone."""

_NOTED_S = 1.0
"""How long the thread that has reaped a child may take to note its exit code."""

_STOP, _LOOK_AGAIN = b"stop", b"look again"
"""What is said to the watching thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One process to start."""

    kind: str
    """What it is, in the log: `engine core`, `API server`, …"""

    title: str
    """Its name in the log; its `ps` title without the prefix."""

    main: Callable[..., object]
    """What it runs. Spawned, so it must be importable by name."""

    arguments: tuple[object, ...]

    epoch: int = 0
    """Incarnation: a restarted child has a higher one."""

    leads_group: bool = False
    """Whether it has a process group of its own, so that what it has started can be ended with
    it."""


def judge(
    child: Child, pid: int | None, exit_code: int | None, last_seen: str = "", signs: str = ""
) -> tuple[bool, str]:
    """Decide what the end of a child means.

    Args:
        child: which one.
        pid: of its process.
        exit_code: negative: the signal that killed it.
        last_seen: what it was doing when it was last heard of, if anybody knows.
        signs: what else the machine knows of it (`workers.death_signs`).

    Returns:
        Whether it may have said why itself (a killed process cannot), and a line for the log.
    """
    who = f"{child.kind} {child.title} pid={pid} node={socket.gethostname()}"
    where = f" in {last_seen}" if last_seen else ""
    return (
        exit_code is None or exit_code >= 0,
        f"{who} {describe_exit(exit_code)}{where}{signs}",
    )


class Supervisor:
    """Children of one server on this node, numbered in the order of their start.

    Args:
        on_death: called once per dead child, from the watching thread, with its number, its epoch
            and the cause.
        has_said_why: whether the first cause of that child's end is in the log already: by its own
            last words, or because another has died before.
        last_seen: what a child was doing when it was last heard of; empty: nobody knows.
        are_deaths_apart: whether children outlive each other, so that each death has a first cause
            of its own.
    """

    def __init__(
        self,
        on_death: Callable[[int, int, str], None],
        has_said_why: Callable[[int, int], bool],
        last_seen: Callable[[int], str] = lambda _: "",
        *,
        are_deaths_apart: bool = False,
    ) -> None:
        self._on_death = on_death
        self._has_said_why = has_said_why
        self._last_seen = last_seen
        self._signs = DeathSigns()
        self._are_deaths_apart = are_deaths_apart
        self._lock = threading.Lock()
        self._is_closed = False
        self._children: list[Child] = []
        self._processes: list[BaseProcess] = []
        self._wake_reader, self._wake_writer = multiprocessing.Pipe(duplex=False)
        self._watcher: threading.Thread | None = None
        self._has_told = False
        """A first cause, which may take a moment to reach `has_said_why`."""

    @property
    def exit_codes(self) -> list[int | None]:
        """By number; None while a child runs."""
        return [process.exitcode for process in self._processes]

    @property
    def epochs(self) -> list[int]:
        """By number, of the latest incarnation."""
        return [child.epoch for child in self._children]

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def start(self, children: Sequence[Child], method: StartMethod) -> None:
        """Start some children. Returns when the processes exist, long before they are ready. May
        be called again before `watch`.

        Raises:
            ServerError: closed meanwhile; nothing has been started.
        """
        with self._lock:
            if self._is_closed:
                raise ServerError("stopped before its processes were started")
            started = [_make_process(child, method) for child in children]
            self._children.extend(children)
            self._processes.extend(started)
            _start(started, method)

    def restart(self, index: int, child: Child, method: StartMethod) -> None:
        """Start a child in the place of an earlier one, of which nothing is left then: it is killed
        if it still runs, with its group if it leads one. After `watch`; from any thread.

        Raises:
            ServerError: closed meanwhile, or what is left of the earlier one survives SIGKILL.
            OSError: the machine has no room for a process; may be called again.
        """
        self._end_for_good(self._children[index], self._processes[index])
        with self._lock:
            if self._is_closed:
                raise ServerError("stopped before its processes were started")
            process = _make_process(child, method)
            _start([process], method)  # if it fails, the earlier one keeps its place
            self._children[index], self._processes[index] = child, process
        self._wake_writer.send_bytes(_LOOK_AGAIN)

    def kill(self, index: int, epoch: int) -> None:
        """Kill a child. Nothing happens if it is gone, or another has its number by now. What
        follows its death comes next."""
        with self._lock:
            child, process = self._children[index], self._processes[index]
            if child.epoch == epoch and process.pid is not None:
                process.kill()  # not by its number, which may be a stranger's once it is reaped

    def _end_for_good(self, child: Child, process: BaseProcess) -> None:
        if process.pid is None:
            return
        survivors = []
        if child.leads_group:
            survivors = end_group(process.pid, _KILL_S)
        process.kill()
        process.join(_KILL_S)
        # Not `is_alive`: where the watching thread has reaped it, that may be true for a moment.
        if survivors or not connection.wait([process.sentinel], timeout=0.0):
            raise ServerError(
                f"{child.kind} {child.title} cannot be replaced: it survives SIGKILL"
                f" pids={survivors or [process.pid]}"
            )

    def watch(self) -> None:
        """Begin to watch. Apart from `start`: with fork, no thread may run before."""
        with self._lock:  # who stops in this very moment finds a thread that can be joined
            self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
            self._watcher.start()

    def unwatch(self) -> None:
        """From now on an end is in order. Nothing can be started any more. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._wake_writer.send_bytes(_STOP)  # closing it would not do: a fork has a copy
        if self._watcher is not None:
            self._watcher.join(_LAST_WORDS_S + 1.0)

    def ask(self) -> list[BaseProcess]:
        """Ask all children to end, after `unwatch`. Returns those that have been started."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            ask_to_end(process)
        return started

    def close(
        self,
        patience_s: float,
        is_urgent: Callable[[], bool] = lambda: False,
        loading: Collection[int] = (),
    ) -> None:
        """End all children: ask, wait, kill. Idempotent; nothing can be started after it.

        Args:
            patience_s: how long they may take; 0: they are killed, and that is in order.
            is_urgent: asked all the time; once true, there is no more waiting.
            loading: those, by number, that nobody waits for: they have done nothing yet.
        """
        self.unwatch()
        for process in [self._processes[number] for number in loading]:
            if process.pid is not None and process.is_alive():
                logger.info("%s is still loading; it is not waited for", process.name)
                process.kill()
        if patience_s <= 0:
            _note_stacks([p for p in self._processes if p.pid is not None and p.is_alive()])
        started = self.ask()  # which moves them
        deadline = time.monotonic() + patience_s
        while any(p.is_alive() for p in started) and not is_urgent():
            if time.monotonic() >= deadline:
                if patience_s > 0:
                    logger.warning("%s not ended within %.1f s; killing", self._alive(), patience_s)
                break
            connection.wait([p.sentinel for p in started if p.is_alive()], timeout=0.05)
        hung = [process for process in started if process.is_alive()]
        if patience_s > 0:
            _note_stacks(hung)
        for process in hung:
            process.kill()
        end_processes(started, timeout_s=5.0)

    def _watch(self) -> None:
        reported: set[BaseProcess] = set()
        while True:
            with self._lock:
                both = zip(self._children, self._processes, strict=True)
                watched = {
                    process.sentinel: (index, child, process)
                    for index, (child, process) in enumerate(both)
                    if process.pid is not None and process not in reported
                }
            ready = connection.wait([*watched, self._wake_reader])
            if self._wake_reader in ready and self._wake_reader.recv_bytes() == _STOP:
                return
            for index, child, process in (watched[s] for s in ready if isinstance(s, int)):
                reported.add(process)
                self._report(index, child, process)

    def _report(self, index: int, child: Child, process: BaseProcess) -> None:
        exit_code = _reap(process)
        run_log.record("exit", process=child.title, pid=process.pid, exit_code=exit_code)
        may_have_spoken, line = judge(
            child, process.pid, exit_code, self._last_seen(index), self._signs.of_exit(exit_code)
        )
        if (
            self._has_told
            or self._has_said_why(index, child.epoch)
            or (may_have_spoken and self._last_words_arrive(index, child.epoch))
        ):
            # The command says last what cannot work.
            where = "told at the end" if exit_code == EXIT_CONFIG else "logged above"
            logger.info("%s; its cause is %s", line, where)
        else:
            self._has_told = not self._are_deaths_apart
            logger.error("first cause: %s", line)
        self._on_death(index, child.epoch, line)

    def _alive(self) -> str:
        return ", ".join(p.name for p in self._processes if p.is_alive())

    def _last_words_arrive(self, index: int, epoch: int) -> bool:
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._has_said_why(index, epoch):
            if time.monotonic() >= deadline or self._is_closed:
                return self._has_said_why(index, epoch)
            time.sleep(0.01)
        return True


def _note_stacks(processes: Sequence[BaseProcess]) -> None:
    """Let processes that are about to be killed say where they stand."""
    for process in processes:
        run_log.ask_for_stacks(process.pid)
    if processes and run_log.folder() is not None:
        time.sleep(_STACKS_S)


def _reap(process: BaseProcess) -> int | None:
    """The exit code of a process that has ended."""
    process.join()
    # Another thread that has reaped it (whoever starts one does so) may yet have to note the code.
    deadline = time.monotonic() + _NOTED_S
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return process.exitcode


def _make_process(child: Child, method: StartMethod) -> BaseProcess:
    classes: dict[StartMethod, Callable[..., BaseProcess]] = {
        "fork": multiprocessing.get_context("fork").Process,
        "spawn": multiprocessing.get_context("spawn").Process,
    }
    main, arguments = child.main, child.arguments
    if child.leads_group:
        main, arguments = _lead_group_and_run, (main, *arguments)
    if method == "fork":
        main = _without_main_module(main)
    return classes[method](target=main, args=arguments, name=child.title)


def _start(processes: Sequence[BaseProcess], method: StartMethod) -> None:
    if method == "spawn":
        resource_tracker.ensure_running()  # started later, it would clear the mask
    with group_signals_held_back():
        for process in processes:
            process.start()


def _lead_group_and_run(main: Callable[..., object], *arguments: object) -> None:
    lead_group()
    main(*arguments)


def _without_main_module(main: Callable[..., object]) -> Callable[..., None]:
    """For forked children. Their workers are spawned, and a spawned process imports its parent's
    `__main__` again: the user's script, which need not be guarded when the engine is forked, and
    which workers have no use for."""

    def forked_main(*arguments: object) -> None:
        sys.modules["__main__"] = types.ModuleType("__main__")
        main(*arguments)

    return forked_main
