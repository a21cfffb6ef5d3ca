"""Logging of a process: one line per event, on standard error, with process, rank and pid.

    INFO 11-29 22:40:01 EngineCore_DP0 pid=4711 engine.process] engine ready num_gpu_blocks=1024
    load_s=3.2

`request_id` in the context is added where set, so a line below the API can be found by the id that
the client saw.
"""

import logging
import multiprocessing
import os
import sys
from contextvars import ContextVar

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_HANDLER_NAME = "raywire"


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(levelname)s %(asctime)s {process} pid={os.getpid()} %(name)s] %(message)s",
            "%m-%d %H:%M:%S",
        )
        self._second = (0, "")
        """The last second of which a line was written, and how it is written."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if self._second[0] != int(record.created):
            self._second = int(record.created), super().formatTime(record, datefmt)
        return self._second[1]

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        current = request_id.get()
        return f"{line} request_id={current}" if current else line


def make_formatter(process: str) -> logging.Formatter:
    """How lines look, wherever they are kept."""
    return _Formatter(process)


def configure(process: str, level: str = "INFO") -> None:
    """Set up the root logger of this process. Calling it again replaces the former set-up, and in a
    child process whatever a fork has brought along, which would write each line a second time.

    Lines do not say which thread or place in the code wrote them, so nobody looks that up.
    """
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as the documentation advises
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(_Formatter(process))
    root = logging.getLogger()
    is_child = multiprocessing.parent_process() is not None
    root.handlers = [h for h in root.handlers if not is_child and h.get_name() != _HANDLER_NAME]
    root.addHandler(handler)
    root.setLevel(level)
