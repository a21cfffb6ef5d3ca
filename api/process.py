"""ENTRY of an API server: the event loop, the HTTP port, and the order in which things start and
stop.

`cluster` calls `run` with everything made or bound; a single API server runs in the command's own
process. Signals are not handled here: whoever calls owns them and hands in a `StopFlag`.
"""

import socket
from collections.abc import Callable
from pathlib import Path

from api.config import ApiConfig
from api.engine_client import EngineClient
from engine.lifecycle import StopFlag


def run(
    config: ApiConfig,
    http_socket: socket.socket,
    client: EngineClient,
    start: Callable[[], Path],
    stop: StopFlag,
) -> int:
    """Serve until stopped or dead. Runs its event loop in the calling thread.

    In this order: the port answers (503 everywhere but on `/live`), `client` is bound, `start` runs
    in a thread of its own, the tokenizer loads in another while the engine cores load, all cores
    say READY, requests are served. After the first stop signal readiness is off, new requests get
    503, running ones have `config.shutdown_timeout_s`; a second signal ends them at once.

    Args:
        config: settings.
        http_socket: bound; `run` listens on it and closes it.
        client: neither bound nor used so far; `run` binds and closes it. Whoever watches the engine
            processes may call its `mark_dead` from any thread, also before `start` returns.
        start: makes the model folder ready, starts the engine cores and returns the folder, which
            has tokenizer and chat template. Its thread lives until `run` returns, so children that
            die with their parent's thread are safe. It may be still under way when `run` returns
            early.
        stop: set by signals.

    Returns:
        The exit code: 0 after a stop, 1 after the death of an engine core, whose cause is then in
        `client.death`. (An engine core that met a ConfigError exits with code 2; whoever started it
        sees that and prints the cause.)

    Raises:
        ConfigError: from `start`, from loading the tokenizer, or because engine cores differ.
    """
    raise NotImplementedError
