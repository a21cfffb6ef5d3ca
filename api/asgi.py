"""Requests and responses as uvicorn hands them over and takes them: what we need of ASGI.

    scope, receive  ->  Request  ->  endpoint  ->  Response or another App  ->  send

Source: the ASGI specification, "HTTP & WebSocket ASGI Message Format", version 2.3.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An application, or a response: it sends itself."""

RawHeaders = list[tuple[bytes, bytes]]


class ClientDisconnect(Exception):
    """The client has gone: nobody waits for an answer."""


class ClientWatch(Protocol):
    """Knows when the client of a request goes away. Part of the scope, under `CLIENT_WATCH`."""

    def start(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when it does: at once, if it has."""

    def stop(self) -> None:
        """Call nobody any more."""


CLIENT_WATCH = "raywire.client_watch"
"""Name of our extension: waiting for ASGI's message needs a task for each request."""


class Request:
    """What a client asks for."""

    __slots__ = ("client_watch", "headers", "method", "path", "raw_headers", "receive")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_headers: RawHeaders = scope["headers"]
        """In the client's order. Names are lower case."""
        self.headers = dict(self.raw_headers)
        """Of headers that came twice, the last."""
        self.receive = receive
        self.client_watch: ClientWatch = scope["extensions"][CLIENT_WATCH]


class Response:
    """A whole answer."""

    __slots__ = ("_body", "_headers", "_status")

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._body = body
        self._status = status
        self._headers = encode_headers(headers or {})
        self._headers.append((b"content-length", b"%d" % len(body)))
        if content_type is not None:
            self._headers.append((b"content-type", content_type.encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self._status, "headers": self._headers}
        )
        await send({"type": "http.response.body", "body": self._body})


def encode_headers(headers: Mapping[str, str]) -> RawHeaders:
    """Headers as they travel."""
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
