"""The output of a batch: a file to which whole lines are appended, so that a run that was killed at
any moment can be taken up again.

A line is complete once its end is there. What a crash has left behind the last end is the beginning
of a line, and is cut off; if it is a line without its end, the end is added. Anything else that is
no result means another file than ours, and nothing is written to it.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from cluster.batch.lines import RESULT_START, Done
from engine.errors import ConfigError

_STDOUT = 1


class ResultFile:
    """Takes results, and knows those of earlier runs."""

    def __init__(self, fd: int, done: Done) -> None:
        self._fd = fd
        self.done = done

    def write(self, line: bytes) -> None:
        """Append a whole line. It is with the kernel when this returns, so that it outlives us.

        Raises:
            OSError: the disk is full, or the reader is gone. What is there of the line is cut off
                by the next run.
        """
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        with suppress(OSError):  # a pipe has none
            os.fsync(self._fd)


@contextmanager
def opened(path: str) -> Iterator[ResultFile]:
    """Open an output, with what it has from earlier runs.

    Args:
        path: of a file, made if it is not there; `-` is standard output. Of that, and of pipes,
            nothing is known from earlier.

    Raises:
        ConfigError: it cannot be written, another run writes to it, or it holds something else.
    """
    fd = _open(path)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or path == "-":
            yield ResultFile(fd, Done())
            return
        _lock(fd, path)
        with os.fdopen(os.dup(fd), "rb") as file:
            done = repair(file, path)
        yield ResultFile(fd, done)
    finally:
        os.close(fd)


def _open(path: str) -> int:
    if path == "-":
        return os.dup(_STDOUT)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _lock(fd: int, path: str) -> None:
    """Two runs that append to one file would both send what neither has found in it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run-batch is writing to {path}") from None
    except OSError:
        pass  # some network file systems have no locks


def repair(file: BinaryIO, name: str) -> Done:
    """Read an output and mend its end. `file` may be open for reading only if its end is whole.

    Raises:
        ConfigError: a line is no result.
    """
    done, size = Done(), 0
    for number, line in enumerate(file, start=1):
        is_result = done.add(line)
        if not line.endswith(b"\n"):
            _mend(file.fileno(), size, line, is_result, name)
        elif not is_result and line.strip():
            raise ConfigError(f"line {number} of {name} is no result of a batch; name another file")
        size += len(line)
    return done


def _mend(fd: int, size: int, rest: bytes, is_result: bool, name: str) -> None:
    """Deal with what comes after the last end of a line, at `size`."""
    if is_result:
        os.write(fd, b"\n")
    elif rest.startswith(RESULT_START) or RESULT_START.startswith(rest):
        os.ftruncate(fd, size)
    else:
        raise ConfigError(f"the end of {name} is no result of a batch; name another file")
