"""One HTTP connection: uvicorn's, with bounds on what a client may have us keep before any route
looks at it. Used by `process`.

    connect -> head (64 KiB, 60 s) -> body (`BodyReader`) -> response -> head …
                                                             unread: 60 s

A client that does not read its answer is held up by the connection's own flow control: nothing more
is written for it, what comes for it is merged (`request_stream`), and after `--send-timeout` it is
cut off, which aborts its request.

What is counted are the bytes since the parser last had something to hand on that is bounded
elsewhere. So the bound holds for a URL, for all header lines together, for one that does not end,
and for trailers behind a body.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from api import client_watch, errors
from api.connection_book import ConnectionBook
from api.errors import Failure
from api.front_door import FrontDoor
from api.limits import HEAD_TIMEOUT_S, MAX_HEAD_BYTES


def kept_in(book: ConnectionBook, door: FrontDoor) -> "type[BoundedConnection]":
    """The connections of one server."""
    return type("Connection", (BoundedConnection,), {"book": book, "door": door})


class BoundedConnection(HttpToolsProtocol):
    """A connection from its first byte to its last."""

    book: ConnectionBook
    door: FrontDoor
    _is_before_head = True
    _num_head_bytes = 0
    _head_deadline: asyncio.TimerHandle | None = None
    _send_deadline: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None
    """What is being answered. `cycle` is the request that came last, which may have to wait."""
    _watch: "_ClientWatch | None" = None
    """Of whoever answers it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.book.max_connections:
            self._refuse(errors.server_failure(503, "too many connections", "connections", 1))
        else:
            self._start_head_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_deadline()
        self._stop_send_deadline()
        self._abandon_requests()
        super().connection_lost(exc)
        # uvicorn lets its timer of a connection that was reset hold all of it for another 75 s.
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                errors.request_failure(
                    431,
                    f"the header lines are longer than {MAX_HEAD_BYTES} bytes",
                    code="too_large",
                )
            )

    def _parse(self, data: bytes) -> None:
        """As uvicorn does, but for heads that offer another protocol: WebSocket, or HTTP/2, which
        Java's client does with every request. A server may ignore the offer (RFC 9110, section
        7.8). The parser takes what follows such a head for the other protocol's, and stops; so it
        gets the head again, without the offer, and then the rest.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                [num_parsed] = stop.args
            if not self._is_offer():
                raise httptools.HttpParserError("a tunnel")
            rest = memoryview(rest)[num_parsed:]
            self._begin_again(self._head_without_offer())

    def _is_offer(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _begin_again(self, head: bytes) -> None:
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.parser.feed_data(head)

    def send_400_response(self, msg: str) -> None:
        self._refuse(errors.request_failure(400, msg, code="bad_http"))

    # ------------------------------------------------------------------------ the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stop_head_deadline()
        self._start_head_deadline()

    def on_headers_complete(self) -> None:
        if self._is_offer():
            return
        self._is_before_head = False
        self._num_head_bytes = 0
        self._stop_head_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_offer():
            return
        self._is_before_head = True
        self._num_head_bytes = 0
        super().on_message_complete()

    # ------------------------------------------------------------------- a client that reads slowly

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_deadline()
        if not self._is_responding():
            self._start_send_deadline()  # for the rest

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_send_deadline()
        if not self._is_before_head:
            # The rest of a body that nobody waits for. uvicorn has no time for it, nor any more for
            # what follows it.
            self._start_head_deadline()

    def _start_send_deadline(self) -> None:
        if self._send_deadline is None and self.transport.get_write_buffer_size():
            timeout_s = self.book.send_timeout_s
            self._send_deadline = self.loop.call_later(timeout_s, self._on_unread, self._running)

    def _stop_send_deadline(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def _on_unread(self, cycle: RequestResponseCycle | None) -> None:
        self._send_deadline = None
        num_bytes = self.transport.get_write_buffer_size()
        if cycle is not self._running:
            self._start_send_deadline()  # it has read the answer that this was for
        elif num_bytes:
            self.book.count(
                "send_timeout",
                self.client,
                f"{num_bytes} bytes of its answer have not been read for"
                f" {self.book.send_timeout_s:g} s",
            )
            self.transport.abort()

    # ------------------------------------------------------------------------------------------

    def _start_head_deadline(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _stop_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _on_slow_head(self) -> None:
        self._head_deadline = None
        if self._is_responding():
            self._start_head_deadline()  # the client may well wait for that first
        elif self._running is not None and not self._num_head_bytes:
            self.transport.close()  # it has its answer, and has begun nothing new
        else:
            self._refuse(
                errors.request_failure(
                    408, f"no request within {HEAD_TIMEOUT_S:.0f} s", code="timeout"
                )
            )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if not self.door.is_for(cycle.scope):
            self._begin(cycle, app)
        # Behind a request that has waited for its turn on this connection: one call for each.
        elif not self.pipeline and (refusal := self.door.refusal(cycle.scope)) is not None:
            self._write_answer(*refusal, is_last=not cycle.keep_alive)
            cycle.response_started = cycle.response_complete = True
            if not cycle.keep_alive:
                self.transport.close()
            self.on_response_complete()
        else:
            self.door.begin(partial(self._begin, cycle, app))

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._watch = _ClientWatch(cycle)
        cycle.scope["extensions"] = {client_watch.EXTENSION: self._watch}  # type: ignore[dict-item]
        if cycle.scope["method"] != "HEAD":
            cycle.transport = _HeadWithBody(cycle)  # type: ignore[assignment]
        if cycle.scope["http_version"] == "1.0":
            app = _Unchunked(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _write_answer(self, failure: Failure, body: bytes, *, is_last: bool) -> None:
        """A whole answer that no route has made."""
        headers = {**failure.headers, "content-type": "application/json"}
        headers["content-length"] = str(len(body))
        if is_last:
            headers["connection"] = "close"
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[failure.status] + head.encode() + b"\r\n" + body)

    def _is_responding(self) -> bool:
        cycle = self._running
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def _abandon_requests(self) -> None:
        """Nobody waits for their answers any more: routes hear that the client has gone, and what
        they still send goes nowhere. uvicorn does so for the request that came last only."""
        self.pipeline.clear()
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        if self._watch is not None:
            self._watch.fire()

    def _refuse(self, failure: Failure) -> None:
        """Answer without looking further, and close."""
        details = failure.details
        assert details.code is not None
        self.book.count(details.code, self.client, details.message)
        is_responding = self._is_responding()
        self._abandon_requests()
        if not is_responding:
            body = failure.body(path="")  # it has not said which
            self._write_answer(failure, body, is_last=True)
        self.transport.close()
        self._start_send_deadline()


class _ClientWatch:
    """The watch over the client of one request: an `client_watch.ClientWatch`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_gone: Callable[[], None] | None = None

    def start(self, on_gone: Callable[[], None]) -> None:
        self._on_gone = on_gone
        self._cycle.flow.resume_reading()  # or the end of the connection would not be noticed
        if self._cycle.disconnected:
            self.fire()

    def stop(self) -> None:
        self._on_gone = None

    def fire(self) -> None:
        if self._on_gone is not None:
            self._on_gone()


class _HeadWithBody:
    """The transport of one response: the head leaves with the first write of the body, which every
    response has, be it an empty one. Two writes would be two system calls and two packets."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None
        self.is_closing = self._transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None and self._cycle.response_started:  # not `100 Continue`
            self._head = data
            return
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def close(self) -> None:
        """As the transport's: what has been written is still sent."""
        if self._head:
            self._transport.write(self._head)
        self._transport.close()


class _Unchunked:
    """An application for a client of HTTP/1.0, which knows no chunks: a body of unknown length ends
    with the connection."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_of_unknown_length = False

        async def send_unchunked(message: Message) -> None:
            nonlocal is_of_unknown_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                is_of_unknown_length = b"content-length" not in names
                if is_of_unknown_length:
                    self._cycle.chunked_encoding = False
            elif is_of_unknown_length:
                # uvicorn compares with what a header has promised, and none has.
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unchunked)
