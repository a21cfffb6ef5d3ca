"""Server-sent events: how a stream of chunks travels over one HTTP response.

    data: {"id":"…","choices":[…]}

    data: [DONE]

`[DONE]` says that the answer is whole, so it is the last event of a stream that ended well, and of
no other: an error after the first byte is one event with an `error` object, and the end.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from api import errors
from engine.errors import RaywireError

DONE = b"data: [DONE]\n\n"

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy that collects chunks would undo the streaming
}
_encode = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """One event. JSON has no raw line breaks, so a body is always one line."""
    return b"data: %b\n\n" % _encode(body)


class EventStream(StreamingResponse):
    """The response of a streaming route: sends events as they come.

    Args:
        events: encoded events, one or more at a time; it may raise a RaywireError.
        close: called at the end, however that comes about.
        headers: further headers.
    """

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(events, headers=_HEADERS | headers, media_type="text/event-stream")
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not the parent's: it listens for the client's end itself, in a task of its own.
        try:
            start: Message = {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
            await send(start)
            await self._send_events(send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._close()

    async def _send_events(self, send: Send) -> None:
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except RaywireError as error:
            last = event(errors.ErrorBody(errors.describe(error).details))
        else:
            last = DONE
        await send({"type": "http.response.body", "body": last, "more_body": True})
