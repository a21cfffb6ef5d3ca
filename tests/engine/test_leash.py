"""Helper processes answer, and never outlive whoever started them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine import leash
from tests.helpers.server import session_processes, wait_for

HELPER = "tests.helpers.leashed"


@contextmanager
def started(pid_file: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A parent, with a session of its own, once its helper holds on to it."""
    call = f"import sys; from engine import leash; leash.run_module({HELPER!r}, *sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", call, str(pid_file), *options], start_new_session=True
    ) as parent:
        try:
            wait_for(pid_file.exists, "the helper runs", 30)
            yield parent
        finally:
            for process in session_processes(parent.pid):
                os.kill(process.pid, signal.SIGKILL)


def test_a_helper_answers_with_output_and_exit_code(tmp_path: Path) -> None:
    """What it says and how it ends come back; its log stays apart."""
    done = leash.run_module(HELPER, str(tmp_path / "pid"), "3", is_quiet=True)

    assert (done.returncode, done.stdout, done.stderr) == (3, "an answer\n", "a word\n")


def test_a_helper_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    """Nothing of it is left when the call returns."""
    with pytest.raises(subprocess.TimeoutExpired):
        leash.run_module(HELPER, str(tmp_path / "pid"), timeout_s=3)

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_helper_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Nobody is there any more to end it; and the parent closes no file in an orderly way."""
    with started(tmp_path / "pid") as parent:
        parent.kill()
        parent.wait(10)

        wait_for(lambda: not session_processes(parent.pid), "the helper is gone", 10)


def test_a_signal_to_the_whole_group_is_the_parents_business(tmp_path: Path) -> None:
    """The helper survives it, so its parent decides; that one's end is the helper's too."""
    with started(tmp_path / "pid") as parent:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        assert len(session_processes(parent.pid)) == 2
        os.killpg(parent.pid, signal.SIGINT)

        assert parent.wait(10) == -signal.SIGINT
        wait_for(lambda: not session_processes(parent.pid), "the helper is gone", 10)
