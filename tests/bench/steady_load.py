"""A client that keeps so many streams open and counts their tokens within a window of time.

    open all streams -> all speak -> warm up -> window -> hang up

Streams are far longer than the window, so nothing begins or ends within it. For the scripted model
only: a token is a character, and so counted even where one event brings several. The client takes
a few per cent of what the server does for a token; both are on one machine.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import uvloop

MAX_TOKENS = 30_000
PROMPT_TOKENS = 64
_SPEAK_TIMEOUT_S = 60.0
_ROUTE = re.compile(rb"\r\nx-raywire-route: rank=(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    wall_s: float
    """Of the window."""
    num_tokens: int
    """Within it, of all streams."""
    streams_by_rank: dict[int, int]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


def run_steady_load(
    port: int,
    *,
    model: str,
    num_streams: int,
    warm_up_s: float,
    window_s: float,
    on_edge: Callable[[], None],
) -> SteadyLoad:
    """Open the streams and count. `on_edge` is called where the window begins and where it ends."""

    async def work() -> SteadyLoad:
        streams = [_Stream(_request(model, number)) for number in range(num_streams)]
        try:
            for stream in streams:
                await stream.open(port)
            async with asyncio.timeout(_SPEAK_TIMEOUT_S):
                await asyncio.gather(*(stream.speaks for stream in streams))
            await asyncio.sleep(warm_up_s)
            on_edge()
            began, before = time.perf_counter(), _total(streams)
            await asyncio.sleep(window_s)
            wall_s, num_tokens = time.perf_counter() - began, _total(streams) - before
            on_edge()
        finally:
            for stream in streams:
                stream.hang_up()
        ranks = [stream.rank for stream in streams]
        return SteadyLoad(wall_s, num_tokens, {rank: ranks.count(rank) for rank in sorted(ranks)})

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


class _Choice(msgspec.Struct):
    text: str


class _Event(msgspec.Struct):
    """Anything else, such as an error, does not decode."""

    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Event).decode


class _Stream(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, request: bytes) -> None:
        self.num_tokens = 0
        self.rank = -1
        self.speaks: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._rest = b""
        self._failure: Exception | None = None
        self._transport: asyncio.Transport | None = None

    async def open(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", port)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.rank < 0:
            self._read_head(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self.num_tokens += sum(len(choice.text) for choice in _decode(line[6:]).choices)
        if self.num_tokens and not self.speaks.done():
            self.speaks.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._failure = RuntimeError(f"a stream has ended after {self.num_tokens} tokens: {exc}")
        if not self.speaks.done():
            self.speaks.set_exception(self._failure)

    def check(self) -> None:
        """Raise if the stream has ended."""
        if self._failure is not None:
            raise self._failure

    def hang_up(self) -> None:
        self.speaks.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"no stream, but {data!r}")
        route = _ROUTE.search(data)
        self.rank = 0 if route is None else int(route[1])  # one rank is no choice


def _total(streams: list[_Stream]) -> int:
    for stream in streams:
        stream.check()
    return sum(stream.num_tokens for stream in streams)


def _request(model: str, number: int) -> bytes:
    """Prompts that have nothing in common: no rank has a reason to get more of them."""
    noise = random.Random(number)
    content = json.dumps(
        {
            "model": model,
            "prompt": noise.choices(range(256), k=PROMPT_TOKENS),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
