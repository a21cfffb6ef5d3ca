"""ENTRY of an API server: the event loop, the HTTP port, and the order in which things start and
stop.

`cluster` calls `run` with everything made or bound; a single API server runs in the command's own
process. Signals are not handled here: whoever calls owns them and hands in a `StopFlag`.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from api import app, sampling_defaults
from api.chat_template import ChatTemplate
from api.config import ApiConfig
from api.connection import kept_in
from api.connection_book import ConnectionBook
from api.engine_client import EngineClient
from api.front_door import FrontDoor
from api.input_processor import InputProcessor
from api.markup import Markup
from api.metrics import MetricsExchange
from api.request_stream import Wakeup
from api.sampling_defaults import SamplingDefaults
from api.service import LoadedModel, Service
from api.threads import LONG_BYTES
from api.tls import TlsConfig, make_context
from api.tokenizer import Tokenizer
from engine.errors import UnavailableError
from engine.lifecycle import StopFlag, in_lasting_thread
from engine.wire import EngineReady

logger = logging.getLogger(__name__)

_POLL_S = 0.05
"""How soon a signal or a death is noticed while the server starts or ends."""

_TICK_S = 1.0
"""How often uvicorn writes a new date for its answers."""

_FLUSH_S = 1.0
"""How long the last words to clients may take: terminal errors of streams that are cut."""

_KEEP_ALIVE_S = 75
"""Longer than the usual clients keep an idle connection, so that they close it, not we: a request
may be on the way."""


def run(
    config: ApiConfig,
    http_socket: socket.socket,
    client: EngineClient,
    start: Callable[[], Path],
    stop: StopFlag,
    may_serve: Callable[[Sequence[EngineReady]], Awaitable[None]] | None = None,
    exchange: MetricsExchange | None = None,
    began: Callable[[], float] = time.monotonic,
    joins: bool = False,
) -> int:
    """Serve until stopped or dead. Runs its event loop in the calling thread.

    In this order: the port answers (503 everywhere but on `/live`), `start` runs in a thread of its
    own, the tokenizer loads in another while the engine cores load, all cores
    say READY, requests are served. After the first stop signal readiness is off, new requests get
    503, running ones have `config.shutdown_timeout_s`; a second signal ends them at once.

    Args:
        config: settings.
        http_socket: bound; `run` listens on it and closes it.
        client: neither bound nor used so far; `run` closes it. Whoever watches the engine
            processes may call its `mark_dead` from any thread, also before `start` returns.
        start: binds the client, makes the model folder ready, starts the engine cores and returns
            the folder, which has tokenizer and chat template. Its thread lives until `run` returns,
            so children that die with their parent's thread are safe. It may be still under way when
            `run` returns early.
        stop: set by signals.
        may_serve: awaited on the event loop, once, when all is loaded, with what the engine cores
            have said; requests are served when it returns.
        exchange: the way to the metrics of other API servers on the same port, if there are any.
        began: when `config.start_timeout_s` began to run, on the monotonic clock; asked once
            `start` has returned.
        joins: other API servers serve on the port already: do not listen before we are ready.

    Returns:
        The exit code: 0 after a stop, 1 after the death of an engine core, whose cause is then in
        `client.death`. (An engine core that met a ConfigError exits with code 2; whoever started it
        sees that and prints the cause.)

    Raises:
        ConfigError: from `start`, from loading the tokenizer, or because engine cores differ.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            _serve(config, http_socket, client, start, stop, may_serve, exchange, began, joins)
        )


async def _serve(
    config: ApiConfig,
    http_socket: socket.socket,
    client: EngineClient,
    start: Callable[[], Path],
    stop: StopFlag,
    may_serve: Callable[[Sequence[EngineReady]], Awaitable[None]] | None,
    exchange: MetricsExchange | None,
    began: Callable[[], float],
    joins: bool,
) -> int:
    # What it does, and what connections do to it, we log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    service = Service(config, client, exchange)
    server = _Server(*app.build(service), service.connections, config.tls)
    may_listen = asyncio.Event()
    if not joins:
        may_listen.set()
    serving = asyncio.create_task(_listen(server, http_socket, may_listen), name="http")
    try:
        with in_lasting_thread(start) as folder:
            loading = _load(service, asyncio.wrap_future(folder), may_serve, began)
            starting = asyncio.create_task(loading, name="start")
            starting.add_done_callback(lambda _: may_listen.set())
            await _until_there_is_a_reason_to_end(client, stop, starting, serving)
            starting.cancel()
            # It may fail of what ends us in the very moment in which it is cancelled.
            starting.add_done_callback(lambda task: task.cancelled() or task.exception())
            if client.death is not None:
                await _linger(service)
            elif service.state == "serving":
                await _drain(service, stop)
            server.cut_off()
            return 0 if client.death is None else 1
    finally:
        server.end()
        may_listen.set()
        await serving
        client.close()
        service.close()


async def _listen(server: "_Server", http_socket: socket.socket, may: asyncio.Event) -> None:
    """Answer on the port until the end, from the moment in which we may."""
    await may.wait()
    if server.should_exit:
        http_socket.close()
    else:
        await server.serve(sockets=[http_socket])


class _Server(uvicorn.Server):
    """Uvicorn, without its signal handlers: they would race with our drain."""

    def __init__(
        self, application: ASGIApp, door: FrontDoor, book: ConnectionBook, tls: TlsConfig | None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                http=kept_in(book, door),
                loop="none",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,  # the edge writes it
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,  # the drain is ours: nothing runs by then
            )
        )

        if tls is not None:
            self.config.load()
            self.config.ssl = make_context(tls)
        self._may_end = asyncio.Event()

    async def main_loop(self) -> None:
        """Uvicorn's own looks ten times a second whether it may end; this one is told."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._may_end.wait(), _TICK_S)

    def end(self) -> None:
        """Let `serve` come to its end."""
        self.should_exit = True
        self._may_end.set()

    def cut_off(self) -> None:
        """Close the connections on which an answer is still under way: those who do not read it.
        Uvicorn would wait for them, and log their end as an error of ours."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and cycle.response_started and not cycle.response_complete:
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _load(
    service: Service,
    started: "asyncio.Future[Path]",
    may_serve: Callable[[Sequence[EngineReady]], Awaitable[None]] | None,
    began: Callable[[], float],
) -> None:
    """Get ready: the tokenizer loads while the engine cores do."""
    folder = await started
    (tokenizer, template, defaults), ready = await asyncio.gather(
        service.threads.run(partial(_load_text, service.config, folder), LONG_BYTES),
        service.client.wait_ready(service.config.start_timeout_s, time.monotonic() - began()),
    )
    max_model_len = min(each.max_model_len for each in ready)
    inputs = InputProcessor(
        tokenizer,
        max_model_len=max_model_len,
        vocab_size=min(each.vocab_size for each in ready),
    )
    service.metrics.on_ready(ready)
    if may_serve is not None:
        await may_serve(ready)
    markup = Markup.choose(service.config, tokenizer, template)
    loaded_at = int(time.time())
    service.serve(
        LoadedModel(tokenizer, template, markup, inputs, max_model_len, loaded_at, defaults)
    )
    logger.info("serving model=%s", ",".join(service.config.served_model_names))


def _load_text(config: ApiConfig, folder: Path) -> tuple[Tokenizer, ChatTemplate, SamplingDefaults]:
    defaults = sampling_defaults.read(
        folder, config.generation_config, config.override_generation_config
    )
    tokenizer = Tokenizer.load(folder)
    _ = tokenizer.max_token_chars  # looks at all of the vocabulary, for the input processor
    return tokenizer, ChatTemplate.load(tokenizer, config.chat_template), defaults


async def _until_there_is_a_reason_to_end(
    client: EngineClient,
    stop: StopFlag,
    starting: "asyncio.Task[None]",
    serving: "asyncio.Task[None]",
) -> None:
    """Raises what made the start, or the server, fail."""
    while not stop.is_set and client.death is None:
        if serving.done():
            return serving.result()
        if starting.done():
            starting.result()
            await _until_a_sign(client, stop, serving)
        else:
            # Deaths may come from threads that cannot wake the loop yet.
            await asyncio.sleep(_POLL_S)


async def _until_a_sign(
    client: EngineClient, stop: StopFlag, serving: "asyncio.Task[None]"
) -> None:
    """Sleep until stopped, or the server has ended, or an engine core has died."""
    stopped, loop = Wakeup(), asyncio.get_running_loop()
    stop.on_set = lambda: loop.call_soon_threadsafe(stopped.set)
    signs = [asyncio.create_task(sign) for sign in (stopped.wait(), client.wait_dead())]
    try:
        if not stop.is_set:
            await asyncio.wait([serving, *signs], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.on_set = None
        for sign in signs:
            sign.cancel()


async def _drain(service: Service, stop: StopFlag) -> None:
    """Let running requests finish, within bounds; cut what is left."""
    service.drain()
    timeout_s = service.config.shutdown_timeout_s
    if service.num_active:
        logger.info("draining num_requests=%d timeout_s=%.0f", service.num_active, timeout_s)
    is_over = lambda: stop.count > 1 or service.client.death is not None  # noqa: E731
    await _wait_idle(service, timeout_s, is_over)
    if service.num_active:
        logger.warning("cutting requests that still run num_requests=%d", service.num_active)
    service.cut(UnavailableError("the server is shutting down"))
    await _wait_idle(service, _FLUSH_S)


async def _linger(service: Service) -> None:
    """After a death: keep answering for a moment, so that everybody gets a straight answer."""
    assert service.client.death is not None
    service.cut(service.client.death)
    service.metrics.on_death()
    await asyncio.sleep(service.config.dead_linger_s)
    await _wait_idle(service, _FLUSH_S)


async def _wait_idle(
    service: Service, timeout_s: float, is_over: Callable[[], bool] = lambda: False
) -> None:
    deadline = time.monotonic() + timeout_s
    # Polled, since a signal cannot set an event of the loop.
    while service.num_active and time.monotonic() < deadline and not is_over():  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
