"""The keeper of a Ray cluster's folder, with a process that has a file there open. Real clusters
are in test_ray_session.py."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.ray_keeper import RayKeeper
from tests.helpers.server import ROOT, wait_for

USER = "import sys, time; file = open(sys.argv[1], 'w'); print(flush=True); time.sleep(60)"
COMMAND = """
import os, signal, sys
from pathlib import Path
from cluster.ray_keeper import RayKeeper
keeper = RayKeeper(Path(sys.argv[1]))
getattr(os, sys.argv[2])(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Reached through a symbolic link, as temporary folders are on some machines."""
    (tmp_path / "real" / "rw-1").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    return tmp_path / "linked" / "rw-1"


@pytest.fixture
def user(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with a log there, which nobody else would end."""
    command = [sys.executable, "-c", USER, str(folder / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_nothing_remains_once_it_is_closed(folder: Path, user: "subprocess.Popen[bytes]") -> None:
    """No process and no file. Whoever closes it lives, with files open there."""
    keeper = RayKeeper(folder)
    with (folder / "ours").open("w"):
        keeper.close()
    keeper.close()

    assert user.wait(10) == -signal.SIGKILL
    assert not folder.exists()


@pytest.mark.parametrize("kill", ["kill", "killpg"])
def test_nothing_remains_of_a_command_that_was_killed(
    kill: str, folder: Path, user: "subprocess.Popen[bytes]"
) -> None:
    """Alone, or with all of its process group."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(folder), kill],
        cwd=ROOT,
        start_new_session=True,
        check=False,
        timeout=30,
    )

    assert done.returncode == -signal.SIGKILL
    assert user.wait(10) == -signal.SIGKILL
    wait_for(lambda: not folder.exists(), "the folder is gone")


@pytest.mark.parametrize("said", [b"", b"."])
def test_a_command_that_dies_before_it_has_said_which_folder_loses_none(
    said: bytes, folder: Path, user: "subprocess.Popen[bytes]"
) -> None:
    """Least of all the one that it was started in."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster.ray_keeper"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=said,
        check=False,
        timeout=30,
    )

    assert done.returncode == 0
    assert user.poll() is None
    assert (folder / "log").exists()


def test_a_start_that_has_failed_leaves_its_logs_and_no_process(
    folder: Path, user: "subprocess.Popen[bytes]"
) -> None:
    keeper = RayKeeper(folder)
    keeper.leave()

    assert user.wait(10) == -signal.SIGKILL
    assert (folder / "log").exists()
