"""What a process leaves in the folder of its run, so that its end can be understood afterwards.

    <run>/logs/EngineCore_DP0.log      its last lines, also below `--log-level`; at most 2 × 64 KiB
    <run>/stacks/EngineCore_DP0.txt    what its threads were at, if it crashed or was hung
    <run>/events.jsonl                 one line for each process that begins, and for each end

The command makes the folder (`cluster/run_folder.py`), and `raywire postmortem` reads it. All of it
is text. Nothing is written for a request, and nothing waits for it: a disk that is full or gone
costs the lines, and no more.
"""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import IO

from engine import log

STACKS_SIGNAL = signal.SIGUSR2
"""A process that keeps a log writes the stacks of its threads when this comes."""

MAX_LOG_BYTES = 64 << 10
"""Of a process's log; what is older goes into one more file of that size, then away."""

_MAX_EVENTS_BYTES = 256 << 10
_ACCESS_LOGGER = "api.edge"

logger = logging.getLogger(__name__)

_folder: Path | None = None
_stacks: IO[str] | None = None
"""Kept open: it is written to when nothing can be opened any more."""


def folder() -> str | None:
    """Of the run that this process belongs to; None: nothing is kept. For the settings of those
    that it starts."""
    return None if _folder is None else str(_folder)


def keep(run_folder: str | None, process: str, *, catches_crashes: bool = True) -> None:
    """Keep what this process says from now on. After `log.configure`.

    Args:
        run_folder: None: nothing is kept.
        process: its name in the log.
        catches_crashes: False in processes whose fatal signals are somebody else's: Ray's.
    """
    global _folder, _stacks  # of a process, as its logging is
    if run_folder is None:
        return
    path = Path(run_folder)
    try:
        for each in (path / "logs", path / "stacks"):
            each.mkdir(parents=True, exist_ok=True)
        _stacks = (path / "stacks" / f"{process}.txt").open("a")
        _add_handler(_KeptLines(path / "logs" / f"{process}.log", process))
    except OSError as error:
        logger.info("nothing is kept of this run: %s", error)
        return
    _folder = path
    if catches_crashes:
        faulthandler.enable(_stacks)
    if sys.platform != "win32":
        faulthandler.register(STACKS_SIGNAL, _stacks, all_threads=True)
    record("begin", process=process, pid=os.getpid(), node=socket.gethostname())


def record(event: str, **facts: object) -> None:
    """Add a line to the run's events. Nothing happens where no run is kept, or the disk is full."""
    if _folder is None:
        return
    line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
    with contextlib.suppress(OSError):
        _append(_folder / "events.jsonl", line.encode(), _MAX_EVENTS_BYTES)


def ask_for_stacks(pid: int | None) -> None:
    """Have a process of this run, which is about to be killed, write what its threads are at."""
    if _folder is not None and pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)


def _add_handler(kept: logging.Handler) -> None:
    """The run's folder has INFO, whatever the level of what people see."""
    root = logging.getLogger()
    level = root.level
    for handler in root.handlers:
        handler.setLevel(max(handler.level, level))
    logging.getLogger(_ACCESS_LOGGER).setLevel(level)  # no line is made that nobody keeps
    root.addHandler(kept)
    root.setLevel(min(level, logging.INFO))


class _KeptLines(logging.Handler):
    """Appends lines to a file of bounded size.

    Not the standard library's: behind that is a buffer which holds what a full disk has not taken,
    and raises it again at every line, and once more at the end.
    """

    def __init__(self, path: Path, process: str) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(log.make_formatter(process))
        self._path = path
        _append(path, b"", MAX_LOG_BYTES)  # raises where nothing can be written

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and (
            record.name == _ACCESS_LOGGER or log.request_id.get() is not None
        ):
            return  # about one request, and there may be thousands a second
        with contextlib.suppress(OSError, ValueError):
            line = f"{self.format(record)}\n".encode(errors="replace")[: MAX_LOG_BYTES // 2]
            if not _append(self._path, line, MAX_LOG_BYTES):
                os.replace(self._path, f"{self._path}.1")
                _append(self._path, line, MAX_LOG_BYTES)


def _append(path: Path, data: bytes, max_bytes: int) -> bool:
    """In one write, so that lines of several processes stay whole. False: the file is full."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.fstat(descriptor).st_size + len(data) > max_bytes:
            return False
        os.write(descriptor, data)
        return True
    finally:
        os.close(descriptor)
