"""ENTRY of an API server process, where there are several: children of the command.

It is told by the command where to bind, which model to load and who may connect, and tells it when
it serves, when it cannot, and when an engine core has died. SIGTERM and SIGINT, which come to the
whole group, are the command's to handle; it passes them on as `STOP_SIGNAL`, once for each.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, assert_never

from api import process
from api.config import ApiConfig
from api.engine_client import EngineClient
from api.engine_handle import Loss
from cluster.channel import (
    Allow,
    Begin,
    Channel,
    Death,
    Drop,
    Loaded,
    Lost,
    Part,
    PartWanted,
    Ping,
    Pong,
    Refusal,
    Scrape,
    Serve,
    Up,
    Whole,
    Wires,
)
from cluster.metrics_exchange import MetricsExchange
from engine import lifecycle, log, run_log
from engine.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    ConfigError,
    EngineDeadError,
    RaywireError,
    ServerError,
)
from engine.wire import EngineReady

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServerConfig:
    """Settings of one API server process."""

    api: ApiConfig
    client_index: int
    num_engines: int
    step_timeout_s: float
    log_level: str
    replaces_ranks: bool = False
    joins: bool = False
    """Whether others serve already: it takes the place of one that has died."""
    run_folder: str | None = None

    @property
    def title(self) -> str:
        return f"APIServer_{self.client_index}"


def main(
    config: ApiServerConfig,
    http_socket: socket.socket,
    connection: "Connection[bytes, bytes]",
) -> NoReturn:
    """Run one API server until it is stopped or something dies. The target of
    `multiprocessing`."""
    lifecycle.set_title(config.title)
    log.configure(config.title, config.log_level)
    run_log.keep(config.run_folder, config.title)
    lifecycle.die_with_parent(at_once=False, is_first_to_know=False)
    lifecycle.leave_stopping_to_parent()
    with lifecycle.stop_on_signals(lifecycle.STOP_SIGNAL) as stop:
        client = EngineClient(
            config.num_engines,
            config.client_index,
            step_timeout_s=config.step_timeout_s,
            first_rank=config.api.first_rank,
            replaces_ranks=config.replaces_ranks,
        )
        command = _Command(Channel(connection), client, config.api.first_rank)
        try:
            code = process.run(
                config.api,
                http_socket,
                client,
                command.wait_for_begin,
                stop,
                may_serve=command.may_serve,
                exchange=command.metrics,
                began=command.began,
                joins=config.joins,
            )
        except ConfigError as error:
            command.channel.send(Refusal(str(error)))
            code = EXIT_CONFIG
        command.metrics.close()
    lifecycle.flush_streams()
    sys.exit(code)


class _Command:
    """The command, as its API server sees it."""

    def __init__(self, channel: Channel, client: EngineClient, first_rank: int) -> None:
        self.channel = channel
        self.metrics = MetricsExchange(channel)
        self._first_rank = first_rank
        self._client = client
        client.deaths.on_death = self._on_death
        client.deaths.on_loss = self._on_loss
        self._begin: Begin | None = None
        self._has_begun = threading.Event()
        self._may_serve = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._listen_or_end, name="command", daemon=True).start()

    def wait_for_begin(self) -> Path:
        """The model's folder, once engine cores are starting."""
        self._has_begun.wait()
        if self._begin is None:
            raise ServerError("the command has ended")
        return Path(self._begin.model_folder)

    def began(self) -> float:
        """When the start's deadline began to run. Once `wait_for_begin` has returned."""
        assert self._begin is not None
        return self._begin.began_s

    async def may_serve(self, ready: Sequence[EngineReady]) -> None:
        """On the event loop: from here on it answers the command, and serves when all can. Were
        `/ready` 200 here and 503 there, a first request might meet the other."""
        lifecycle.freeze_heap()
        self._loop = asyncio.get_running_loop()
        self._client.on_ready = lambda each: self.channel.send(Up(each))
        self.channel.send(Loaded(list(ready)))
        await self._may_serve.wait()

    def _on_serve(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has ended, and so do we
            self._loop.call_soon_threadsafe(self._may_serve.set)

    def _on_drop(self, client_index: int, arrived_before: float) -> None:
        loop = self._loop
        if loop is not None:  # else we have sent nothing, and cannot
            tell = self._tell_cores(client_index, arrived_before)
            asyncio.run_coroutine_threadsafe(tell, loop)

    async def _tell_cores(self, client_index: int, arrived_before: float) -> None:
        try:
            nums = await self._client.utility("drop_client", client_index, arrived_before)
        except RaywireError as error:  # a rank that is being replaced, perhaps
            logger.info("not all engine cores have dropped APIServer_%d: %s", client_index, error)
        else:
            if any(nums):
                logger.info("aborted num_requests=%d of APIServer_%d", sum(nums), client_index)

    def _on_ping(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has ended, and so do we
            self._loop.call_soon_threadsafe(self._pong)

    def _pong(self) -> None:
        self.channel.send(Pong([engine.last_seen_in for engine in self._client.engines]))

    def _listen_or_end(self) -> None:
        try:
            self._listen()
        except Exception:  # of ours, or the command's messages cannot be read
            logger.warning("nobody listens to the command any more; ending", exc_info=True)
            # It would hear of no death and no stop, and be found out in 10 s. The command, which
            # waits on this process, logs the first cause.
            os._exit(EXIT_FAILED)

    def _listen(self) -> None:
        while True:
            try:
                message = self.channel.receive()
            except EOFError:  # the process is about to be ended, by `die_with_parent`
                self._has_begun.set()
                return
            match message:
                case Wires():
                    self._client.bind(self.channel.receive_wires(message))
                case Begin(_, coordinator, _, expected, ready, epochs):
                    if ready is not None:
                        self._client.introduce(ready, epochs)
                    if expected is not None:
                        self._client.expect(expected)
                    if coordinator is not None:
                        self._client.follow(coordinator)
                    self._begin = message
                    self._has_begun.set()
                case Serve():
                    self._on_serve()
                case Drop(client_index, arrived_before):
                    self._on_drop(client_index, arrived_before)
                case Allow(public_keys):
                    self._client.allow(public_keys)
                case Death(engine_index, cause, _):
                    self._client.mark_dead(engine_index, cause)
                case Lost(engine_index, epoch, cause, _):
                    self._client.lose(engine_index, epoch, cause)
                case PartWanted():
                    self.metrics.on_part_wanted()
                case Whole():
                    self.metrics.on_whole(message)
                case Ping():
                    self._on_ping()
                case Loaded() | Refusal() | Up() | Scrape() | Part() | Pong():
                    raise AssertionError("an API server's words came from the command")
                case _:
                    assert_never(message)

    def _on_loss(self, loss: Loss) -> None:
        self.channel.send(Lost(loss.engine_index, loss.epoch, loss.cause, loss.is_first))

    def _on_death(self, death: EngineDeadError, is_first: bool) -> None:
        # All API servers see the same silence; the command, which hears of it from each, logs it.
        index = None if death.rank is None else death.rank - self._first_rank
        self.channel.send(Death(index, death.cause, is_first))
