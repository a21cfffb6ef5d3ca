"""Faults are dealt to processes of one server, and to nobody else."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from api.chaos import KINDS, Kind, Process, choose, processes_below, strike
from tests.helpers.server import wait_for
from tests.helpers.titled import titled_process


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_processes_are_those_below_the_command_with_a_title_of_ours() -> None:
    """Sorted by title; neither others of its children nor other servers."""
    with ExitStack() as stack:
        titles = ("RAYWIRE::Worker_DP0_PP0_TP0", "RAYWIRE::EngineCore_DP0", "something else")
        pids = [stack.enter_context(titled_process(title)).pid for title in titles]

        found = processes_below(os.getpid())

        assert found == [
            Process("EngineCore_DP0", pids[1]),
            Process("Worker_DP0_PP0_TP0", pids[0]),
        ]
        assert processes_below(pids[1]) == [Process("EngineCore_DP0", pids[1])]
        assert processes_below(pids[2]) == []


def test_the_draw_decides_who_it_is() -> None:
    """Among those of the role, and the same one again."""
    processes = [
        Process(title, pid)
        for pid, title in enumerate(
            (
                "APIServer_0",
                "DPCoordinator",
                "EngineCore_DP0",
                "EngineCore_DP1",
                "Worker_DP0_PP0_TP0",
            )
        )
    ]
    chosen = [choose(processes, "rank", draw) for draw in (0.0, 0.49, 0.5, 0.999)]
    assert [process and process.title for process in chosen] == [
        *("EngineCore_DP0", "EngineCore_DP0"),
        *("EngineCore_DP1", "EngineCore_DP1"),
    ]
    assert choose(processes[:1], "worker", 0.5) is None


def test_a_killed_process_is_gone_and_a_hung_one_stands_still() -> None:
    """And who is gone already cannot be killed again."""
    with titled_process("RAYWIRE::EngineCore_DP0") as process:
        target = Process("EngineCore_DP0", process.pid)
        strike(target, "hang")
        wait_for(lambda: state_of(process.pid) == "T", "stopped")
        strike(target, "kill")
        assert process.wait(5) == -9
        with pytest.raises(ProcessLookupError):
            strike(target, "kill")


def test_a_pause_ends_by_itself() -> None:
    """Stopped, and running again."""
    with titled_process("RAYWIRE::EngineCore_DP0") as process:
        strike(Process("EngineCore_DP0", process.pid), "pause", 0.2)
        wait_for(lambda: state_of(process.pid) == "T", "stopped")
        wait_for(lambda: state_of(process.pid) == "S", "running")


def test_who_pauses_itself_wakes_up_again() -> None:
    """Its own thread could not do it."""
    code = (
        "import os, time; from api.chaos import Process, strike;"
        "print(flush=True); strike(Process('APIServer_0', os.getpid()), 'pause', 0.5);"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for(lambda: state_of(process.pid) == "T", "stopped")
        began = time.monotonic()
        wait_for(lambda: state_of(process.pid) != "T", "running")
        assert time.monotonic() - began < 5
        process.kill()


def test_a_pause_ends_although_who_made_it_is_killed() -> None:
    """The next fault may well meet that API server."""
    code = (
        "import sys, time; from api.chaos import Process, strike;"
        "strike(Process('EngineCore_DP0', int(sys.argv[1])), 'pause', 1.0); time.sleep(60)"
    )
    with titled_process("RAYWIRE::EngineCore_DP0") as victim:
        command = [sys.executable, "-c", code, str(victim.pid)]
        with subprocess.Popen(command, start_new_session=True) as maker:
            wait_for(lambda: state_of(victim.pid) == "T", "stopped")
            os.killpg(maker.pid, signal.SIGKILL)
            maker.wait(5)
        wait_for(lambda: state_of(victim.pid) == "S", "running")


def test_kinds_are_read_as_they_are_written() -> None:
    """Each by its name; what is none is answered with those there are."""
    assert [Kind.parse(str(kind)) for kind in KINDS] == list(KINDS)
    assert str(KINDS[0]) == "kill-rank"
    with pytest.raises(ValueError, match=r"'hang-coordinator' is none of kill-rank, "):
        Kind.parse("hang-coordinator")
