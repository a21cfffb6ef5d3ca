"""ENTRY of the command: `raywire …` or `python -m cluster …`."""

import atexit
import os
import signal
import sys
from types import FrameType

from cluster.secret_arguments import hide

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Run the command line and exit."""
    hide(sys.argv[1:])
    is_server = sys.argv[1:2] == ["serve"]
    if is_server:
        # While the rest is imported there is nothing to drain, and a stop is one in order all the
        # same. `launch` puts its own handlers in place of these as long as there is a server.
        _exit_on_signals(0)
        # The first that is registered runs last. After it Python gives up its handlers, but leaves
        # alone what is ignored: else a stop would change how a server ended.
        atexit.register(_ignore_signals)
    # Not at the top: a spawned child imports the main module of its parent again, which for the
    # installed `raywire` script means this file, and it needs no command line.
    from cluster.cli import run

    try:
        run()
    except SystemExit as end:
        if is_server:
            _exit_on_signals(end.code if isinstance(end.code, int) else 0)  # decided by now
            from engine.lifecycle import flush_streams  # other commands never import it

            flush_streams()
        raise


def _exit_on_signals(code: int) -> None:
    """End at once, with `code` and without a word, when SIGTERM, SIGINT or SIGHUP comes."""

    def end(_: int, frame: FrameType | None) -> None:
        os._exit(code)

    for signum in _STOP_SIGNALS:
        signal.signal(signum, end)


def _ignore_signals() -> None:
    for signum in _STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


if __name__ == "__main__":
    main()
