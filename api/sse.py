"""Server-sent events: how a stream of chunks travels over one HTTP response.

    data: {"id":"…","choices":[…]}

    data: [DONE]

`[DONE]` says that the answer is whole, so it is the last event of a stream that ended well, and of
no other: an error after the first byte is one event with an `error` object, and the end. Routes
whose streams end otherwise write their own ends.

A message is a system call and a packet, which cost more than what is in it: all that is there at
one time goes out as one, and the end of a stream with its last events.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api import errors
from api.ids import new_id
from engine.errors import RaywireError

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects chunks would undo the streaming
]
_CONTENT_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
_encode = msgspec.json.Encoder().encode

_MARK = new_id("text ", num_bits=128)
"""Stands for a text while what surrounds it is encoded. Nobody else can have come upon it."""


def event(body: Any) -> bytes:
    """One event. JSON has no raw line breaks, so a body is always one line."""
    return b"data: %b\n\n" % _encode(body)


def named_event(name: str, body: Any) -> bytes:
    """One event with a name, for APIs whose clients look at it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(body))


def failed(failure: errors.Failure) -> bytes:
    """The event that ends a stream in which something has failed."""
    return event(failure.openai_body)


class TextEvents:
    """Events that differ in a text alone, as nearly all of a stream do: the rest is encoded once.

    Args:
        make_body: makes the body of an event: for a choice, by its index, and with a text.
        name: of the events, where they have one.
    """

    def __init__(self, make_body: Callable[[int, str], Any], name: str | None = None) -> None:
        self._make_body = make_body
        self._event = event if name is None else partial(named_event, name)
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """The same as `event`, or `named_event`, of the body."""
        before, after = self._around_text.get(index) or self._encode_around(index)
        return before + _encode(text) + after

    def _encode_around(self, index: int) -> tuple[bytes, bytes]:
        before, after = self._event(self._make_body(index, _MARK)).split(_encode(_MARK))
        self._around_text[index] = before, after
        return before, after


class EventSource(Protocol):
    """Where the events of a stream come from."""

    @property
    def is_over(self) -> bool:
        """Whether those of the last `next` were the last."""

    async def next(self) -> bytes:
        """One or more events, encoded, once there is anything new; none where it cannot be shown
        yet. The last ones say that the stream is whole. A RaywireError ends it."""

    def failed(self, failure: errors.Failure) -> bytes:
        """The events that end it then."""


class EventStream(Response):
    """The response of a streaming route: sends events as they come.

    Args:
        source: of the events.
        close: called at the end, however that comes about.
        headers: further headers.
    """

    def __init__(
        self, source: EventSource, close: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        self._source = source
        self._close = close
        own = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        self.status_code, self.background = 200, None
        self.raw_headers = [*_HEADERS, *own, _CONTENT_TYPE]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            is_last = False
            while not is_last:
                events, is_last = await self._next()
                await send({"type": "http.response.body", "body": events, "more_body": not is_last})
        finally:
            self._close()

    async def _next(self) -> tuple[bytes, bool]:
        """What to send, and whether the stream ends with it."""
        source = self._source
        try:
            events = await source.next()
        except RaywireError as error:
            return source.failed(errors.describe(error)), True
        return events, source.is_over
