"""Completions over HTTP, and the time of every event. Used by `raywire bench serve`.

An answer that is not streamed is one event.

A connection of asyncio with httptools' parser, both of which a server of ours needs anyway: there
is nothing to install, and the client takes little of a machine that it often shares with the server
it measures. Connections are kept open and used again, as clients do.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from cluster.server_url import server_url

_MAX_ERROR_BYTES = 500


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go."""

    host: str
    port: int
    path: str
    is_tls: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, base_url: str, path: str, headers: Mapping[str, str]) -> "Endpoint":
        """Raises ConfigError unless `base_url` is one of HTTP, as `server_url` takes it."""
        url = urlsplit(server_url(base_url))
        is_tls = url.scheme == "https"
        port = url.port or (443 if is_tls else 80)
        return cls(str(url.hostname), port, url.path + path, is_tls, headers)

    def request(self, body: Mapping[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content


@dataclass(slots=True)
class Answer:
    """What came for one request, and when, on `time.perf_counter`."""

    sent_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    """Of each event with text."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """As the server's usage says; without one, the events."""
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        return self.event_s[0] - self.sent_s

    @property
    def whole_s(self) -> float:
        return self.event_s[-1] - self.sent_s

    @property
    def between_events_s(self) -> list[float]:
        return [
            after - before for before, after in zip(self.event_s, self.event_s[1:], strict=False)
        ]

    @property
    def per_token_s(self) -> float | None:
        """Of all tokens but the first. An event may bring several, so events do not tell."""
        if self.num_tokens < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.num_tokens - 1)


@dataclass(slots=True)
class LoadResult:
    wall_s: float
    answers: list[Answer]

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.good)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def first_token_s(self) -> list[float]:
        return [answer.first_token_s for answer in self.good]

    @property
    def between_tokens_s(self) -> list[float]:
        return [gap for answer in self.good for gap in answer.between_events_s]


def run_load(
    endpoint: Endpoint,
    bodies: Sequence[Mapping[str, Any]],
    *,
    arrivals_s: Sequence[float] | None = None,
    max_concurrency: int | None = None,
) -> LoadResult:
    """Send all requests and wait for their ends.

    Args:
        endpoint: where to.
        bodies: one for each request.
        arrivals_s: when each may be sent, in seconds from the start; None is all at once.
        max_concurrency: how many are in flight at most. The clock of one that has to wait for that
            starts when it is sent.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(_Client(endpoint), bodies, arrivals_s, max_concurrency))


async def _run(
    client: "_Client",
    bodies: Sequence[Mapping[str, Any]],
    arrivals_s: Sequence[float] | None,
    max_concurrency: int | None,
) -> LoadResult:
    requests = [client.endpoint.request(body) for body in bodies]
    room = asyncio.Semaphore(max_concurrency or len(requests))

    async def work(request: bytes, arrival_s: float) -> Answer:
        # More than once: a loop that was held up has an old clock, and wakes too early.
        while (early_s := began + arrival_s - time.perf_counter()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(early_s)
        async with room:
            return await client.ask(request)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(work(request, arrival_s))
            for request, arrival_s in zip(
                requests, arrivals_s or [0.0] * len(requests), strict=True
            )
        ]
    wall_s = time.perf_counter() - began
    client.close()
    return LoadResult(wall_s, [task.result() for task in tasks])


class _Client:
    """Connections to one endpoint, of which the idle ones are used first."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if endpoint.is_tls else None

    async def ask(self, request: bytes) -> Answer:
        answer = Answer()
        try:
            if not await self._ask_idle(request, answer):
                await self._ask_on(await self._connect(), request, answer)
        except OSError as error:
            answer.error = answer.error or str(error) or type(error).__name__
        if answer.error is None and not answer.event_s:
            answer.error = "an answer without any text"
        answer.num_tokens = answer.num_tokens or len(answer.event_s)
        return answer

    async def _ask_idle(self, request: bytes, answer: Answer) -> bool:
        """False where there is no idle connection, or the server had closed it by then."""
        while self._idle:
            if (connection := self._idle.pop()).is_reusable:
                try:
                    await self._ask_on(connection, request, answer)
                except OSError:
                    if connection.has_received:
                        raise
                    return False
                return True
        return False

    async def _ask_on(self, connection: "_Connection", request: bytes, answer: Answer) -> None:
        await connection.exchange(request, answer)
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> "_Connection":
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self.endpoint.host, self.endpoint.port, ssl=self._tls
        )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_token(self) -> bool:
        """A completion's event stands for a token even where its text is still held back; a chat
        begins with one that has only a role."""
        if self.delta is None:
            return self.text is not None
        return bool(self.delta.content or self.delta.reasoning_content)


_has_token = attrgetter("has_token")


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Connection(asyncio.Protocol):
    """One request at a time. Also the listener of httptools' parser: its `on_…` methods."""

    def __init__(self) -> None:
        self.is_reusable = True
        self.has_received = False
        """Whether anything of the present answer has come."""
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._end: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._is_stream = True
        self._now_s = 0.0

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Send a request and read its answer to the end. OSError if the connection fails."""
        assert self._transport is not None
        self._answer, self._rest, self.has_received = answer, b"", False
        self._parser = httptools.HttpResponseParser(self)
        self._end = asyncio.get_running_loop().create_future()
        answer.sent_s = time.perf_counter()
        self._transport.write(request)
        await self._end

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------------- from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's

    def data_received(self, data: bytes) -> None:
        self._now_s, self.has_received = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            cause = error.__context__ or error  # the parser hides what its listener raises
            self._fail(f"not what an OpenAI-compatible server answers: {cause}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection has ended: {exc or 'closed by the server'}")

    def _fail(self, message: str) -> None:
        self.close()
        if self._end is not None and not self._end.done():
            self._end.set_exception(ConnectionError(message))

    # ----------------------------------------------------------------------------- from the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = not value.startswith(b"application/json")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest = (self._rest + body)[:_MAX_ERROR_BYTES]
            return
        if not self._is_stream:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (content := line[5:].strip()) != b"[DONE]":
                self._on_event(_decode(content))

    def _on_event(self, event: _Event) -> None:
        if event.error is not None:
            self._answer.error = json.dumps(event.error)
        if any(map(_has_token, event.choices)):
            self._answer.event_s.append(self._now_s)
        if event.usage is not None:
            self._answer.num_prompt_tokens = event.usage.prompt_tokens
            self._answer.num_tokens = event.usage.completion_tokens or 0

    def on_message_complete(self) -> None:
        if (status := self._parser.get_status_code()) != 200:
            self._answer.error = f"HTTP {status}: {self._rest.decode(errors='replace')}"
        elif not self._is_stream:
            self._on_event(_decode(self._rest))
        self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
