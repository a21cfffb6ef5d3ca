"""One request as a client sends it, and what became of it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from tests.soak.answers import Answer, Improper
from tests.soak.cases import Case

GAP_S = 0.2
"""Shorter ones between two events are not kept."""

End = Literal["whole", "left", "refused", "error", "broken", "down", "improper", "hung"]
"""
whole     a proper answer
left      the client went away, as it had meant to
refused   a 4xx
error     the server says that it has failed: 5xx, or an error event that ends a stream
broken    the connection was reset or ended too early
down      nobody was there, or only somebody who said that the server is not
improper  an answer of another form than was promised
hung      neither an answer nor an error in time
"""


@dataclass(slots=True)
class Exchange:
    """Times are of `time.monotonic`."""

    case: Case
    is_streamed: bool
    began_at: float
    ended_at: float = 0.0
    end: End = "whole"
    why: str = ""
    status: int | None = None
    answer: Answer = field(default_factory=Answer)
    first_at: float | None = None
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """When one began, and how long it was: between events of a stream."""


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    case: Case,
    is_streamed: bool,
    leave_after: int | None = None,
    limit_s: float = 120.0,
) -> Exchange:
    """Send a request and read its answer to the end.

    Args:
        session: without a time limit of its own.
        url: of the server.
        case: what to ask.
        is_streamed: whether to ask for a stream.
        leave_after: the client goes away after so many events, or seconds if it is not streamed.
        limit_s: no request takes so long; one that does has hung.
    """
    exchange = Exchange(case, is_streamed, time.monotonic())
    try:
        async with asyncio.timeout(limit_s):
            await _converse(session, url, exchange, leave_after)
    except TimeoutError:
        exchange.end, exchange.why = "hung", f"no end within {limit_s:.0f} s"
    except Improper as error:
        exchange.end, exchange.why = "improper", str(error)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        # Not JSON, or not of the shape that the API promises.
        exchange.end, exchange.why = "improper", f"{type(error).__name__}: {error}"
    except aiohttp.ClientConnectorError as error:
        exchange.end, exchange.why = "down", str(error)
    except (aiohttp.ClientError, OSError) as error:
        exchange.end, exchange.why = "broken", f"{type(error).__name__}: {error}"
    exchange.ended_at = time.monotonic()
    return exchange


async def _converse(
    session: aiohttp.ClientSession, url: str, exchange: Exchange, leave_after: int | None
) -> None:
    body = dict(exchange.case.body)
    if exchange.is_streamed:
        options = {"include_usage": True, **body.get("stream_options", {})}
        body |= {"stream": True, "stream_options": options}
    else:
        body.pop("stream_options", None)
    try:
        leave_s = leave_after if leave_after is not None and not exchange.is_streamed else None
        async with (
            asyncio.timeout(leave_s),
            session.post(url + exchange.case.path, json=body) as response,
        ):
            exchange.status = response.status
            if response.status != 200:
                _take_failure(exchange, await response.read())
            elif exchange.is_streamed:
                await _read_stream(exchange, response.content, leave_after)
            else:
                exchange.answer.take(json.loads(await response.read()))
                exchange.answer.check_whole(exchange.case.num_choices)
    except TimeoutError:
        if leave_s is None:
            raise
        exchange.end = "left"


def _take_failure(exchange: Exchange, content: bytes) -> None:
    assert exchange.status is not None
    try:
        exchange.answer.take(json.loads(content))
    except ValueError:
        raise Improper(f"HTTP {exchange.status} with {content[:200]!r}") from None
    if exchange.answer.error is None:
        raise Improper(f"HTTP {exchange.status} without an error")
    code = exchange.answer.error.get("code")
    is_down = exchange.status == 503 and code != "engine_dead"
    exchange.end = "down" if is_down else "refused" if exchange.status < 500 else "error"
    exchange.why = f"{exchange.status} {code}"


async def _read_stream(
    exchange: Exchange, content: aiohttp.StreamReader, leave_after: int | None
) -> None:
    answer, last_at, count = exchange.answer, exchange.began_at, 0
    async for event in _events(content):
        now = time.monotonic()
        if exchange.first_at is None:
            exchange.first_at = now
        elif now - last_at > GAP_S:
            exchange.gaps.append((last_at, now - last_at))
        last_at, count = now, count + 1
        if event is None:
            if answer.is_done:
                raise Improper("the stream says twice that it is over")
            answer.is_done = True
        else:
            answer.take(event)
        if leave_after is not None and count >= leave_after:
            exchange.end = "left"
            return
    if answer.error is not None:
        if answer.is_done:
            raise Improper("an error, and then the end of a stream that went well")
        exchange.end, exchange.why = "error", str(answer.error.get("code"))
        return
    if not answer.is_done:
        raise Improper("the stream has ended without saying so")
    answer.check_whole(exchange.case.num_choices)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any] | None]:
    """Events of a stream; None is its `[DONE]`."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield None if line == b"data: [DONE]" else json.loads(line[6:])
