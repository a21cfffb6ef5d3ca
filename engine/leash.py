"""Short-lived helper processes on a leash: they end when whoever started them does, however it
died.

Conversions and downloads run in them, because they need what must not stay with a server (torch,
transformers), or threads that nothing can stop. A helper is a module of ours, run by `run_module`;
its first call is `hold_on`. The leash is its standard input: nothing is ever written there, and its
end means that the parent is gone. Helpers answer on standard output.

A helper that answers many questions is started by `start_module` and reads them from its standard
input, which is its leash as well.
"""

import atexit
import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from engine import log
from engine.lifecycle import leave_stopping_to_parent

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[1]


def run_module(
    module: str, *arguments: str, timeout_s: float | None = None, is_quiet: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m module arguments` to its end, and kill it if this call does not get there.

    Args:
        module: of ours, by its full name.
        arguments: of its command line.
        timeout_s: how long it may take.
        is_quiet: catch its standard error too, rather than let it into our log.

    Returns:
        Its exit code and what it wrote.

    Raises:
        subprocess.TimeoutExpired: it took too long, and has been killed.
    """
    reader, writer = os.pipe()
    try:
        with subprocess.Popen(
            _command(module, *arguments),
            stdin=reader,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if is_quiet else None,
            env=_environment(),
            text=True,
            errors="replace",
        ) as process:
            end = functools.partial(_end, process)
            atexit.register(end)  # for a thread that is left here when this process ends
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
            finally:
                atexit.unregister(end)
    finally:
        os.close(reader)
        os.close(writer)  # not before: it is the leash
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors or "")


def start_module(
    module: str, *, leads_group: bool = False, **environment: str
) -> "subprocess.Popen[bytes]":
    """Start `python -m module`, with pipes to its standard input and output. Its standard error is
    dropped: what it has to say it answers.

    Args:
        module: of ours, by its full name. It ends when its standard input does.
        leads_group: it has a process group of its own, and survives what kills ours as a whole.
        environment: variables that it gets beside ours.
    """
    return subprocess.Popen(
        _command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment() | environment,
        process_group=0 if leads_group else None,
    )


def _command(module: str, *arguments: str) -> list[str]:
    # -P, because the modules of a user's working directory are not meant.
    return [sys.executable, "-P", "-m", module, *arguments]


def _environment() -> dict[str, str]:
    # By our folder, since a script elsewhere may have found us through its own sys.path.
    search_path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": search_path}


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def hold_on(name: str) -> None:
    """End this helper process at once when its parent is gone. Signals to the whole group are left
    to the parent, which ends its helpers. The first call in every helper; it sets up logging too.
    """
    log.configure(name, (os.environ.get("RAYWIRE_LOG_LEVEL") or "INFO").upper())
    leave_stopping_to_parent()
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()


def _end_with_parent() -> None:
    # Not sys.stdin, whose lock an interpreter that shuts down would wait for.
    while os.read(0, 4096):
        pass
    logger.info("the process that started this one is gone; ending with it")
    os.kill(os.getpid(), signal.SIGKILL)
