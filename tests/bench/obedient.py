"""Processes of an engine that stay up between measurements, so that engines can take turns."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from cluster.bench.machine import Tree

START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 60.0
_OBEY = Path(__file__).with_name("obey.py")


class Obedient:
    """The parent's end of an `obey` process. Only one question at a time."""

    def __init__(self, process: "subprocess.Popen[str]", replies: TextIO, log: Path) -> None:
        self.tree = Tree(process.pid)
        self._process = process
        self._replies = replies
        self._log = log

    def ask(self, command: str, **arguments: Any) -> Any:
        """Run a command there. RuntimeError if the process ends or does not answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        return self.wait(ANSWER_TIMEOUT_S)

    def wait(self, timeout_s: float) -> Any:
        """The next answer."""
        deadline = time.monotonic() + timeout_s
        # A descriptor that a grandchild has inherited does not close when the child ends.
        while not select.select([self._replies], [], [], 1.0)[0]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no answer; see {self._log}")
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"it has ended; see {self._log}")
        return json.loads(line)


@contextmanager
def obedient(
    python: str, environ: Mapping[str, str], commands: Path, arguments: Mapping[str, Any], log: Path
) -> Iterator[Obedient]:
    """Start the commands of a file under a Python, and end them with the block."""
    read_fd, write_fd = os.pipe()
    # -P: the folder of that file is not the place to import from.
    words = [python, "-P", str(_OBEY), str(commands), str(write_fd), json.dumps(arguments)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            words,
            env=environ,
            # Elsewhere than in our checkout, so that nothing there is imported by the peer.
            cwd=log.parent,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            pass_fds=(write_fd,),
        )
    os.close(write_fd)
    with process, os.fdopen(read_fd) as replies:
        try:
            child = Obedient(process, replies, log)
            child.wait(START_TIMEOUT_S)
            yield child
        finally:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            _kill(child.tree)


def _kill(tree: Tree) -> None:
    """Whatever is left of it."""
    for pid in tree.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
