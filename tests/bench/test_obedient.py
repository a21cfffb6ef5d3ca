"""Engines that take turns wait in processes that do what they are told."""

import os
import sys
from pathlib import Path

import pytest

from tests.bench.obedient import obedient

COMMANDS = """
import os, sys

def open_commands(start):
    print("loaded")
    total = [start]

    def add(number):
        total[0] += number
        return {"total": total[0]}

    def end():
        os._exit(3)

    return {"add": add, "end": end}
"""


def test_a_process_keeps_its_state_between_commands(tmp_path: Path) -> None:
    """What it prints goes into its log, and answers are what the commands return."""
    file, log = tmp_path / "commands.py", tmp_path / "child.log"
    file.write_text(COMMANDS)

    with obedient(sys.executable, os.environ, file, {"start": 5}, log) as child:
        answers = [child.ask("add", number=2), child.ask("add", number=3)]
        pids = child.tree.pids()

    assert answers == [{"total": 7}, {"total": 10}]
    assert log.read_text() == "loaded\n"
    assert pids
    assert not child.tree.pids()


def test_the_end_of_a_process_is_told_with_its_log(tmp_path: Path) -> None:
    """Nobody waits for an answer that cannot come."""
    file, log = tmp_path / "commands.py", tmp_path / "child.log"
    file.write_text(COMMANDS)

    with (
        obedient(sys.executable, os.environ, file, {"start": 5}, log) as child,
        pytest.raises(RuntimeError, match=str(log)),
    ):
        child.ask("end")
