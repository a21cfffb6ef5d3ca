"""A command on a terminal of its own, with somebody at the keys."""

import contextlib
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

from tests.helpers.server import ROOT, wait_for

TIMEOUT_S = 30.0
CTRL_C, CTRL_D = "\x03", "\x04"

# The first terminal that a session's leader opens becomes the session's: Ctrl-C goes through it.
_START = """
import os, runpy, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
sys.argv[0] = "raywire"
runpy.run_module("cluster", run_name="__main__", alter_sys=True)
"""


class Terminal:
    """What is typed, and what is to be seen."""

    def __init__(self, process: "subprocess.Popen[bytes]", fd: int) -> None:
        self.process = process
        self._fd = fd
        self._seen = b""
        self._num_read = 0

    @property
    def screen(self) -> str:
        """All that has been shown, typed text too."""
        return self._seen.decode(errors="replace").replace("\r\n", "\n")

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str) -> None:
        """Wait until `text` is shown, after what was waited for before."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := self.screen.find(text, self._num_read)) < 0:
            assert self._read(deadline), f"no {text!r} on the terminal:\n{self.screen}"
        self._num_read = found + len(text)

    def wait_for_prompt(self) -> None:
        """Wait until a line can be edited. Before that a Ctrl-C counts from the next key on."""
        self.wait_for("> ")
        wait_for(lambda: not termios.tcgetattr(self._fd)[3] & termios.ECHO, "its keys are read")

    def interrupt_line(self) -> None:
        """Press Ctrl-C in the middle of a line, until there is a new one: Python notices one that
        comes while it handles a key with the next key only."""
        while self.screen.find("\n> ", self._num_read) < 0:
            self.press(CTRL_C)
            deadline = time.monotonic() + 2.0
            while self.screen.find("\n> ", self._num_read) < 0 and self._read(deadline):
                pass
        self.wait_for_prompt()

    def wait(self) -> int:
        """Wait for the end of the command; its exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._read(deadline):
            pass
        return self.process.wait(TIMEOUT_S)

    def _read(self, deadline: float) -> bool:
        """False at the end, or when nothing comes."""
        readable, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return False
        try:
            content = os.read(self._fd, 4096)
        except OSError:  # Linux says so when nobody has the terminal open any more
            return False
        self._seen += content
        return bool(content)


@contextlib.contextmanager
def on_terminal(*args: str) -> Iterator[Terminal]:
    """Run `raywire args` for as long as the block."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *args],
            cwd=ROOT,
            env={**os.environ, "TERM": "dumb"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            process.wait(TIMEOUT_S)
    finally:
        os.close(ours)
