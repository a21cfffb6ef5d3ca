"""ENTRY of the server that `run-batch` starts for itself: all of `raywire serve`, on a port of the
loopback device that the kernel chooses, as a child process that ends with its parent.

A terminal's Ctrl-C comes to it too. It leaves stopping to its parent, which asks with
`STOP_SIGNAL`.
"""

import asyncio
import dataclasses
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

import click

from cluster.config import ServeConfig
from cluster.http_socket import listen_group
from engine import log
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, ServerError
from engine.lifecycle import (
    STOP_SIGNAL,
    ask_to_end,
    describe_exit,
    die_with_parent,
    end_processes,
    group_signals_held_back,
    stop_on_signals,
)

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_END_S = 30.0
"""How long it may take to end. Its only client has gone by then, and so have its requests."""


class ServerEndedError(ServerError):
    """The server has ended while it was needed. It has said why, in the log."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"the server has ended ({describe_exit(self.exit_code)}); its log says why"


class OwnServer:
    """The child, from its parent's side."""

    def __init__(
        self, process: multiprocessing.process.BaseProcess, port: int, api_key: str
    ) -> None:
        self._process = process
        self.url = f"http://{HOST}:{port}"
        self.api_key = api_key
        """Of this server only: others on this machine may reach its port too."""

    async def end(self) -> int:
        """Wait until the process is gone. Returns its exit code."""
        while (code := self._process.exitcode) is None:  # noqa: ASYNC110  # a poll costs nothing
            await asyncio.sleep(0.05)
        return code


@asynccontextmanager
async def own_server(config: ServeConfig) -> AsyncIterator[OwnServer]:
    """Run a server for as long as the block. It is still loading when the block begins.

    Args:
        config: its host, port and keys do not matter.

    Raises:
        ConfigError: the loopback device has no port for us.
    """
    sockets = listen_group(HOST, 0, config.topology.num_api_servers)
    port = sockets[0].getsockname()[1]
    api_key = secrets.token_urlsafe()
    variables = dataclasses.replace(config.environment, api_keys=(), metrics_keys=(), admin_keys=())
    config = dataclasses.replace(config, api_key=(api_key,), environment=variables)
    process = multiprocessing.get_context("spawn").Process(
        target=main, args=(config, sockets), name="server"
    )
    resource_tracker.ensure_running()  # started later, it would clear the mask
    with group_signals_held_back():
        process.start()
    for each in sockets:
        each.close()  # else who connects after its death would wait for ever
    try:
        yield OwnServer(process, port, api_key)
    finally:
        ask_to_end(process)
        await asyncio.to_thread(end_processes, [process], _END_S)


def main(config: ServeConfig, http_sockets: Sequence[socket.socket]) -> NoReturn:
    """Serve until the parent says stop or is gone. The target of `multiprocessing`."""
    signal.signal(STOP_SIGNAL, _end_at_once)
    os.dup2(2, 1)  # standard output may be where the results go
    log.configure("server", config.log_level)
    die_with_parent(at_once=False, is_first_to_know=True)
    # What comes to the group is heard and not heeded. Ignored it would be by Ray's processes too,
    # which inherit that.
    with stop_on_signals():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        # Only here: it takes seconds, in which a stop is heard already.
        from cluster.launch import serve

        try:
            sys.exit(serve(config, http_sockets, STOP_SIGNAL))
        except ConfigError as error:
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            sys.exit(EXIT_CONFIG)
        except ServerError as error:
            logger.error("first cause: %s", error)
            sys.exit(EXIT_FAILED)


def _end_at_once(_: int, frame: FrameType | None) -> NoReturn:
    """There is nothing yet to be ended in order, and afterwards nothing any more."""
    os._exit(0)
