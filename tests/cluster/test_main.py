"""Signals before the server is there, and after its end."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """\
import sys, time, types
def pause():
    print("here", flush=True)
    time.sleep(60)
sys.argv = ["raywire", *{arguments!r}]
{setup}
from cluster.__main__ import main
main()
"""

SLOW_IMPORT = """\
class Finder:
    def find_spec(self, name, *_):
        if name == "cluster.cli": pause()
sys.meta_path.insert(0, Finder())"""

SLOW_END = """\
import atexit
def run():
    atexit.register(pause)
    sys.exit(1)
cli = sys.modules["cluster.cli"] = types.ModuleType("cluster.cli")
cli.run = run"""

SLOW_FINALIZATION = """\
import builtins, os
class Last:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"here\\n")
        sleep(0.5)
builtins.last = Last()
def run():
    sys.exit(1)
cli = sys.modules["cluster.cli"] = types.ModuleType("cluster.cli")
cli.run = run"""


LEFT_BEHIND = """\
import atexit, os, threading
from unittest.mock import Mock
from cluster.ray_session import RaySession
def run():
    atexit.register(os.abort)  # what follows in the end of the interpreter
    assert not RaySession(Mock()).end_within(0.01, threading.Event().wait)
    sys.exit(1)
cli = sys.modules["cluster.cli"] = types.ModuleType("cluster.cli")
cli.run = run"""


def signalled(signum: signal.Signals, setup: str, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a command that gets a signal where `setup` makes it wait."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(arguments=arguments, setup=setup)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            process.send_signal(signum)
            _, errors = process.communicate(timeout=10)
        finally:
            process.kill()
    return process.returncode, errors


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_server_is_imported_is_one_in_order(signum: signal.Signals) -> None:
    """Exit code 0 and not a word, as later."""
    assert signalled(signum, SLOW_IMPORT, "serve", "scripted") == (0, "")


def test_other_commands_end_as_commands_do() -> None:
    """`plan` that is stopped has not done its work."""
    code, _ = signalled(signal.SIGTERM, SLOW_IMPORT, "plan")
    assert code == -signal.SIGTERM


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_after_the_end_does_not_change_how_it_ended(signum: signal.Signals) -> None:
    """A server whose engine has died says so, whoever stops it then."""
    assert signalled(signum, SLOW_END, "serve", "scripted") == (1, "")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_interpreter_ends_does_not_either(signum: signal.Signals) -> None:
    """Python has given up its own handlers by then."""
    assert signalled(signum, SLOW_FINALIZATION, "serve", "scripted") == (1, "")


def test_ray_that_is_left_behind_does_not_change_how_it_ended() -> None:
    """Its threads crash an interpreter that ends under them, so ours does not get as far."""
    script = SCRIPT.format(arguments=("serve", "scripted"), setup=LEFT_BEHIND)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)

    assert (done.returncode, done.stderr) == (1, b"")
