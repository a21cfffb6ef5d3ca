"""A process that ends with another one, which is not its parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.command_watch import ProcessIdentity, end_with, identify
from tests.helpers.server import ROOT

WATCHER = """
import sys, time
from cluster.command_watch import ProcessIdentity, end_with
end_with(ProcessIdentity(int(sys.argv[1]), sys.argv[2]))
print("watching", flush=True)
time.sleep(60)
"""


@pytest.fixture
def command() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_killed_command_takes_the_actor_with_it(command: "subprocess.Popen[bytes]") -> None:
    """At once, also while the command is a zombie that nobody has reaped."""
    identity = identify(command.pid)
    assert identity is not None
    arguments = [sys.executable, "-c", WATCHER, str(identity.pid), identity.started]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE) as actor:
        assert actor.stdout is not None
        assert actor.stdout.readline() == b"watching\n"
        os.kill(command.pid, signal.SIGKILL)

        assert actor.wait(10) == -signal.SIGKILL


def test_a_stranger_with_the_same_pid_is_not_watched(command: "subprocess.Popen[bytes]") -> None:
    """In a PID namespace of its own an actor sees others under the command's number."""
    end_with(ProcessIdentity(command.pid, "0"))
    command.kill()
    command.wait()

    assert identify(command.pid) is None  # and this process lives
