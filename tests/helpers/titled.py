"""Processes that do nothing but bear a title."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_CODE = """
import setproctitle, sys, time
setproctitle.setproctitle(sys.argv[1]); print(flush=True); time.sleep(60)
"""


@contextmanager
def titled_process(title: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A child that `ps` shows under that title; killed with the block."""
    command = [sys.executable, "-c", _CODE, title]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()
