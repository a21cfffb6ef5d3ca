"""How our processes start and end, with real processes and real signals."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import psutil
import pytest

from engine.lifecycle import (
    STOP_SIGNAL,
    StopFlag,
    ask_to_end,
    describe_exit,
    end_processes,
    interrupted_by,
    stop_on_signals,
)

USR2 = signal.SIGUSR2
SPAWN = multiprocessing.get_context("spawn")
HEAP = """
import psutil
from engine.lifecycle import freeze_heap
own = psutil.Process()
loaded, kept = [], []
for _ in range(2_000):  # what stays lies above: no free stretch reaches the end of the heap
    loaded.append(bytearray(32 << 10))
    kept.append(bytearray(600))
del loaded
before = own.memory_info().rss
freeze_heap()
print(before - own.memory_info().rss)
"""


class Stopped(BaseException):
    pass


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    """A signal left ignored would be ignored by all later children too."""
    before = signal.getsignal(USR2)
    yield
    signal.signal(USR2, before)


def stop() -> None:
    raise Stopped


# ----------------------------------------------------------------------------------- own signals


def kill_later(signum: signal.Signals, delay_s: float = 0.05) -> threading.Timer:
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signum))
    timer.start()
    return timer


@pytest.mark.parametrize(
    "block",
    [
        lambda: queue.SimpleQueue[int]().get(timeout=20.0),
        lambda: threading.Event().wait(20.0),
        lambda: time.sleep(20.0),
    ],
    ids=["queue", "event", "sleep"],
)
def test_a_signal_interrupts_what_blocks_the_main_thread(block: Callable[[], object]) -> None:
    """At once, and once: the signal is ignored afterwards."""

    def be_signalled() -> None:
        with interrupted_by(USR2, stop):
            timers.append(kill_later(USR2))  # not before: it would end this process
            block()

    timers: list[threading.Timer] = []
    began = time.monotonic()
    with pytest.raises(Stopped):
        be_signalled()
    timers[0].join()

    assert time.monotonic() - began < 5.0
    os.kill(os.getpid(), USR2)


def test_no_signal_is_lost_in_the_instant_before_a_sleep() -> None:
    """Fifty signals, each sent when another thread has just taken the interpreter lock from us."""

    def be_signalled_and_sleep() -> None:
        ready = threading.Event()

        def kill() -> None:
            ready.wait()
            os.kill(os.getpid(), USR2)

        threading.Thread(target=kill).start()
        with interrupted_by(USR2, stop):
            ready.set()
            queue.SimpleQueue[int]().get(timeout=20.0)

    for _ in range(50):
        began = time.monotonic()
        with pytest.raises(Stopped):
            be_signalled_and_sleep()
        assert time.monotonic() - began < 5.0


def test_the_stop_flag_counts_signals() -> None:
    """The second one means at once; handlers are as before after the block."""
    before = signal.getsignal(USR2)
    with stop_on_signals(USR2) as flag:
        counts = [flag.count]
        for _ in range(2):
            os.kill(os.getpid(), USR2)
            counts.append(flag.count)

    assert counts == [0, 1, 2]
    assert flag.is_set
    assert not StopFlag().is_set
    assert signal.getsignal(USR2) is before


def test_a_hangup_stops_unless_it_was_to_be_ignored() -> None:
    """A terminal that closes is a stop in order; under `nohup` it is nothing."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, count in ((signal.SIG_DFL, 1), (signal.SIG_IGN, 0)):
            signal.signal(signal.SIGHUP, handler)
            with stop_on_signals() as flag:
                os.kill(os.getpid(), signal.SIGHUP)
                assert flag.count == count
    finally:
        signal.signal(signal.SIGHUP, before)


# -------------------------------------------------------------------------------------- children


def sleep_stubbornly(started: Connection) -> None:
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    started.send_bytes(b"x")
    time.sleep(600)


def sleep_obediently(started: Connection) -> None:
    started.send_bytes(b"x")
    time.sleep(600)


def test_processes_are_waited_for_then_killed() -> None:
    """Who heeds the stop signal ends by it, the other by SIGKILL; both are gone on return."""
    reader, writer = SPAWN.Pipe(duplex=False)
    children = [
        SPAWN.Process(target=target, args=(writer,))
        for target in (sleep_obediently, sleep_stubbornly)
    ]
    for child in children:
        child.start()
    for _ in children:
        reader.recv_bytes()

    for child in children:
        ask_to_end(child)
    end_processes([*children, SPAWN.Process()], timeout_s=0.2)

    assert [child.exitcode for child in children] == [-STOP_SIGNAL, -signal.SIGKILL]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_child_dies_with_its_killed_parent(at_once: bool) -> None:
    """Within 5 s, while it sleeps; the watching thread logs the first cause where it has time."""
    command = [sys.executable, "-m", "tests.helpers.parent_of_sleeper", str(at_once)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(timeout=5.0)
        log = parent.stderr.read()

    assert log.count("first cause: parent process") == (0 if at_once else 1)


def test_a_stopped_child_dies_with_its_parent_too() -> None:
    """The kernel wakes it, so that its watching thread can act."""
    command = [sys.executable, "-m", "tests.helpers.parent_of_sleeper", "False"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        child.suspend()
        parent.kill()
        child.wait(timeout=5.0)


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (None, "still running"),
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-250, "killed by signal 250"),
    ],
)
def test_exit_codes_read_well(exit_code: int | None, words: str) -> None:
    """As an operator would say it."""
    assert describe_exit(exit_code) == words


def test_a_log_that_cannot_be_written_does_not_change_the_exit_code() -> None:
    """Its disk is full. Python alone would end with 120."""
    code = (
        "import sys; from engine.lifecycle import flush_streams;"
        "sys.stdout.write('out'); sys.stderr.write('err'); flush_streams(); sys.exit(3)"
    )
    environ = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, stdout=full, stderr=full, env=environ, check=False)
    assert run.returncode == 3


def test_what_loading_has_left_goes_back_to_the_system() -> None:
    """What was freed counts as a process's memory until the C library is told to let go: here 62
    MiB. In a process of its own, whose heap no other test has left full of holes."""
    run = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 32 << 20
