"""The parent of a server's processes: starts them, notices their death, ends them."""

import errno
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from multiprocessing import util
from typing import Any
from unittest.mock import Mock

import pytest

from cluster import supervisor as supervisor_module
from cluster.process_group import group_members
from cluster.supervisor import Child, Supervisor, judge
from engine.errors import ServerError
from engine.lifecycle import STOP_SIGNAL
from tests.helpers.server import wait_for


def sleep() -> None:
    """A child that works until it is told to stop."""
    time.sleep(600)


def refuse_to_end() -> None:
    """A child that does not heed the stop signal."""
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    time.sleep(600)


def fail() -> None:
    """A child that ends by itself."""
    raise SystemExit(3)


def start_a_sleeper_and_sleep() -> None:
    """A child with a worker that would outlive it."""
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)


def core(main: Callable[[], None], index: int = 0, **fields: Any) -> Child:
    return Child(
        kind="engine core", title=f"EngineCore_DP{index}", main=main, arguments=(), **fields
    )


@dataclass
class Parent:
    """Who owns the supervisor: remembers what it is told."""

    said_why: set[int] = field(default_factory=set)
    deaths: list[tuple[int, int, str]] = field(default_factory=list)
    died: threading.Event = field(default_factory=threading.Event)

    def on_death(self, index: int, epoch: int, cause: str) -> None:
        self.deaths.append((index, epoch, cause))
        self.died.set()

    def has_said_why(self, index: int, epoch: int) -> bool:
        return index in self.said_why


@pytest.fixture
def parent() -> Parent:
    return Parent()


@pytest.fixture
def supervisors() -> Iterator[list[Supervisor]]:
    """Supervisors that are closed at the end, whatever the test did."""
    made: list[Supervisor] = []
    yield made
    for supervisor in made:
        supervisor.close(0.0)


def first_causes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "first cause:" in r.getMessage()]


def test_a_killed_core_is_the_first_cause(
    parent: Parent, supervisors: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    """One ERROR with title, pid and signal, and the owner is told."""
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why))
    supervisors[0].start([core(sleep)], "spawn")
    supervisors[0].watch()
    [pid] = supervisors[0].pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    assert parent.died.wait(10)
    who = f"engine core EngineCore_DP0 pid={pid} node={socket.gethostname()}"
    [(index, epoch, cause)] = parent.deaths
    assert (index, epoch) == (0, 0)
    assert cause.startswith(f"{who} killed by SIGKILL")
    assert first_causes(caplog) == [f"first cause: {cause}"]


def test_a_core_that_has_said_why_is_not_the_first_cause(
    parent: Parent, supervisors: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    """Its own ERROR is in the log already; ours would be a second one."""
    caplog.set_level(logging.INFO)
    parent.said_why.add(0)
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why))
    supervisors[0].start([core(fail)], "spawn")
    supervisors[0].watch()

    assert parent.died.wait(10)
    assert supervisors[0].exit_codes == [3]
    assert first_causes(caplog) == []
    assert "exit code 3; its cause is logged above" in caplog.text


def test_a_core_that_ends_without_a_word_is_the_first_cause(
    parent: Parent, supervisors: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    """After the time that last words may take."""
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why))
    supervisors[0].start([core(fail)], "spawn")
    supervisors[0].watch()

    assert parent.died.wait(10)
    [cause] = first_causes(caplog)
    assert cause.endswith("exit code 3")


def test_what_dies_after_another_is_not_the_first_cause(
    parent: Parent, supervisors: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    """Two children that are killed at once leave one first cause, though nobody else has taken note
    of it yet."""
    supervisors.append(Supervisor(parent.on_death, lambda *_: False))
    supervisors[0].start([core(sleep, 0)], "spawn")
    supervisors[0].start([core(sleep, 1)], "spawn")
    pids = [pid for pid in supervisors[0].pids if pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    supervisors[0].watch()

    wait_for(lambda: len(parent.deaths) == 2, "two deaths", timeout_s=30)

    assert len(pids) == 2
    assert len(first_causes(caplog)) == 1


def test_closing_asks_and_is_no_death(
    parent: Parent, supervisors: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    """By the stop signal, and nobody is told of a death."""
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why))
    supervisors[0].start([core(sleep)], "spawn")
    supervisors[0].watch()

    supervisors[0].close(5.0)
    supervisors[0].close(5.0)

    assert supervisors[0].exit_codes == [-STOP_SIGNAL]
    assert parent.deaths == []
    assert first_causes(caplog) == []


def test_a_core_that_does_not_end_is_killed(parent: Parent, supervisors: list[Supervisor]) -> None:
    """At once when it is urgent: a second signal has come."""
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why))
    supervisors[0].start([core(refuse_to_end)], "spawn")

    began = time.monotonic()
    supervisors[0].close(60.0, is_urgent=lambda: True)

    assert supervisors[0].exit_codes[0] in (-signal.SIGKILL, -STOP_SIGNAL)
    assert time.monotonic() - began < 30


def test_who_is_still_loading_is_not_waited_for(
    parent: Parent, supervisors: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    """It is deep in a file, perhaps, and has done nothing yet. The others are asked, and end."""
    caplog.set_level(logging.INFO)
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why))
    supervisors[0].start([core(sleep), core(sleep, 1)], "spawn")

    supervisors[0].close(60.0, loading=[1])

    assert supervisors[0].exit_codes == [-STOP_SIGNAL, -signal.SIGKILL]
    assert "EngineCore_DP1 is still loading; it is not waited for" in caplog.text
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_nothing_starts_after_the_end(parent: Parent) -> None:
    """A start that is still under way when the server stops must not leave an engine."""
    supervisor = Supervisor(parent.on_death, parent.has_said_why)
    supervisor.close(0.0)

    with pytest.raises(ServerError, match="stopped before"):
        supervisor.start([core(sleep)], "spawn")
    assert supervisor.pids == []


def test_a_stop_in_the_moment_in_which_it_begins_to_watch(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come whenever it likes, to another thread than the one that starts."""
    supervisor = Supervisor(parent.on_death, parent.has_said_why)
    errors: list[Exception] = []

    def stop() -> None:
        try:
            supervisor.close(0.0)
        except Exception as error:  # noqa: BLE001 - whichever: it would leave all children behind
            errors.append(error)

    stopping = threading.Thread(target=stop)

    class LateThread(threading.Thread):
        """So slow to start that the stop could be over by then."""

        def start(self) -> None:
            stopping.start()
            stopping.join(0.5)
            super().start()

    with monkeypatch.context() as patched:
        late = types.SimpleNamespace(**vars(threading) | {"Thread": LateThread})
        patched.setattr(supervisor_module, "threading", late)
        supervisor.watch()
    stopping.join(10)
    assert not stopping.is_alive()
    assert errors == []


def test_a_dead_core_is_followed_by_another(
    parent: Parent, supervisors: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    """Under the same number; its death, too, is told, and has a first cause of its own."""
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why, are_deaths_apart=True))
    supervisors[0].start([core(sleep)], "spawn")
    supervisors[0].watch()
    first, *_ = supervisors[0].pids
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert parent.died.wait(10)

    supervisors[0].restart(0, core(sleep, epoch=7), "spawn")
    second, *_ = supervisors[0].pids
    assert second not in (None, first)
    os.kill(second, signal.SIGKILL)

    wait_for(lambda: len(parent.deaths) == 2, "two deaths")
    assert [(index, epoch) for index, epoch, _ in parent.deaths] == [(0, 0), (0, 7)]
    for pid, cause in zip((first, second), first_causes(caplog), strict=True):
        assert f"pid={pid} " in cause
    assert supervisors[0].exit_codes == [-signal.SIGKILL]


def test_nothing_is_left_of_a_core_that_is_replaced(
    parent: Parent, supervisors: list[Supervisor]
) -> None:
    """It may be stopped, and what it has started may not end with it."""
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why, are_deaths_apart=True))
    supervisors[0].start([core(start_a_sleeper_and_sleep, leads_group=True)], "spawn")
    supervisors[0].watch()
    [old] = supervisors[0].pids
    assert old is not None
    wait_for(lambda: len(group_members(old)) == 2, "a child and its own")
    os.kill(old, signal.SIGSTOP)

    supervisors[0].restart(0, core(sleep, epoch=1), "spawn")

    assert group_members(old) == []
    assert supervisors[0].exit_codes == [None]


def test_only_the_incarnation_that_is_meant_is_killed(
    parent: Parent, supervisors: list[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has its number by now is left alone: another child, or a stranger once the process
    is reaped."""
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why, are_deaths_apart=True))
    supervisors[0].start([core(sleep, epoch=1)], "spawn")
    supervisors[0].watch()
    with monkeypatch.context() as guarded:
        killed = Mock()
        guarded.setattr(os, "kill", killed)
        supervisors[0].kill(0, 0)
        killed.assert_not_called()

    supervisors[0].kill(0, 1)
    assert parent.died.wait(10)
    with monkeypatch.context() as guarded:
        guarded.setattr(os, "kill", killed)
        supervisors[0].kill(0, 1)
        killed.assert_not_called()


def test_a_start_that_fails_can_be_tried_again(
    parent: Parent, supervisors: list[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without room for a process may have some a moment later; who watches goes on."""
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why, are_deaths_apart=True))
    supervisors[0].start([core(sleep, 0), core(sleep, 1)], "spawn")
    supervisors[0].watch()
    first, other = supervisors[0].pids
    assert first is not None
    assert other is not None

    with monkeypatch.context() as full:
        full.setattr(util, "spawnv_passfds", Mock(side_effect=OSError(errno.EAGAIN, "no room")))
        with pytest.raises(OSError, match="no room"):
            supervisors[0].restart(0, core(sleep, epoch=1), "spawn")
    assert supervisors[0].pids == [first, other]
    supervisors[0].restart(0, core(sleep, epoch=2), "spawn")
    os.kill(other, signal.SIGKILL)

    wait_for(lambda: len(parent.deaths) == 2, "two deaths")
    assert [(index, epoch) for index, epoch, _ in parent.deaths] == [(0, 0), (1, 0)]
    assert supervisors[0].epochs == [2, 0]


def test_who_is_gone_has_not_survived_whoever_reaped_it(
    parent: Parent, supervisors: list[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads that wait for a process one gets its exit code, and until it has noted it the
    other is told by Python that the process is alive."""
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "is_alive", lambda _: True)
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why, are_deaths_apart=True))
    supervisors[0].start([core(sleep)], "spawn")
    supervisors[0].watch()

    supervisors[0].restart(0, core(sleep, epoch=1), "spawn")

    assert supervisors[0].epochs == [1]
    monkeypatch.undo()


def test_an_exit_code_is_waited_for_until_it_is_noted(
    parent: Parent, supervisors: list[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that has reaped the process, where that is another."""
    codes = chain([None] * 3, repeat(3))
    exit_code = property(lambda _: next(codes))
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "exitcode", exit_code)
    supervisors.append(Supervisor(parent.on_death, parent.has_said_why))
    supervisors[0].start([core(fail)], "spawn")
    supervisors[0].watch()

    assert parent.died.wait(10)
    [(_, _, cause)] = parent.deaths
    assert cause.endswith("exit code 3")


def test_nothing_is_replaced_after_the_end(parent: Parent) -> None:
    """A server that stops ends what has taken its place, or nothing has."""
    supervisor = Supervisor(parent.on_death, parent.has_said_why, are_deaths_apart=True)
    supervisor.start([core(sleep)], "spawn")
    supervisor.watch()
    supervisor.close(0.0)

    with pytest.raises(ServerError, match="stopped before"):
        supervisor.restart(0, core(sleep, epoch=1), "spawn")
    assert None not in supervisor.exit_codes


@pytest.mark.parametrize(
    ("exit_code", "may_have_spoken", "words"),
    [(-9, False, "killed by SIGKILL"), (1, True, "exit code 1"), (0, True, "exit code 0")],
)
def test_only_a_killed_core_cannot_have_said_why(
    exit_code: int, may_have_spoken: bool, words: str
) -> None:
    """Whether last words are worth waiting for."""
    assert judge(core(sleep), 7, exit_code) == (
        may_have_spoken,
        f"engine core EngineCore_DP0 pid=7 node={socket.gethostname()} {words}",
    )


def test_a_death_says_what_the_process_was_doing_and_what_the_machine_knows() -> None:
    """All in the one line that an operator reads."""
    _, line = judge(core(sleep), 7, -9, "step 3, EXECUTE for 0.2 s", "; out of memory")
    assert line.endswith(" killed by SIGKILL in step 3, EXECUTE for 0.2 s; out of memory")
