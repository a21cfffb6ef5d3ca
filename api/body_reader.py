"""Request bodies: bytes off the connection, each within bounds, and all together.

Used by the routes, through `Service`; `body` makes structs of them.
"""

import asyncio

from starlette.requests import ClientDisconnect, Request

from api.errors import HttpError
from api.limits import MAX_UNFINISHED_BODIES, MIN_BODY_BYTES_PER_S
from engine.errors import RaywireError, UnavailableError


class BodyReader:
    """Takes in the bodies of requests: each within bounds, and all together.

    Args:
        max_bytes: of one body.
        timeout_s: for which nothing of a body may come; after it, too, at least
            `MIN_BODY_BYTES_PER_S` must have come on average.
    """

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_bytes = 0
        """Held of bodies that are not complete."""
        self._pending: set[asyncio.Timeout] = set()
        self._error: RaywireError | None = None

    async def read(self, request: Request) -> bytes:
        """Return the whole body of a JSON request.

        Raises:
            HttpError: 413 as soon as it is too long, 415 if it is not JSON or compressed, 408 if it
                does not come.
            UnavailableError: there are too many unfinished ones.
            ClientDisconnect: the client has gone.
        """
        _check_headers(request)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            raise _too_long(self._max_bytes)
        try:
            async with asyncio.timeout(self._timeout_s) as patience:
                return await self._read(request, patience)
        except TimeoutError as error:
            if self._error is not None:
                raise self._error.with_traceback(None) from None
            raise _too_slow(self._timeout_s) from error

    async def _read(self, request: Request, patience: asyncio.Timeout) -> bytes:
        chunks: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._pending.add(patience)
        try:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                size += len(chunk)
                self._num_bytes += len(chunk)
                if size > self._max_bytes:
                    raise _too_long(self._max_bytes)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
                if self._num_bytes > MAX_UNFINISHED_BODIES * self._max_bytes:
                    raise UnavailableError("too many long bodies are on their way", 1)
                latest_s = began_s + size / MIN_BODY_BYTES_PER_S
                patience.reschedule(min(loop.time(), latest_s) + self._timeout_s)
        finally:
            self._pending.discard(patience)
            self._num_bytes -= size

    def cut(self, error: RaywireError) -> None:
        """Wait for no body any longer; who still sends one gets `error`."""
        self._error = error
        for patience in self._pending:
            if not patience.expired():
                patience.reschedule(asyncio.get_running_loop().time())


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HttpError(
            415,
            f"send the body as application/json, not {media_type[:80]}",
            code="unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "send the body uncompressed", code="unsupported_encoding")


def _too_long(max_bytes: int) -> HttpError:
    # The rest stays unread, so the connection cannot carry another request.
    return HttpError(
        413,
        f"the body is longer than {max_bytes} bytes",
        code="body_too_large",
        headers={"connection": "close"},
    )


def _too_slow(timeout_s: float) -> HttpError:
    return HttpError(
        408,
        f"the body has not come: nothing for {timeout_s:.0f} s, or too little",
        code="body_timeout",
        headers={"connection": "close"},
    )
