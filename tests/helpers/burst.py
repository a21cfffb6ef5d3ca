"""Very many requests at one time, from one process: each has a connection of its own, and all are
sent when all are connected."""

import asyncio
import math
import time
from dataclasses import dataclass, field

_CONNECTED_AT_ONCE = 256


@dataclass(slots=True)
class Reply:
    """What came on one connection."""

    raw: bytes
    first_byte_s: float
    """From sending, until something came."""

    @property
    def status(self) -> int:
        return int(self.raw[9:12] or 0)

    @property
    def retry_after_s(self) -> int | None:
        head, _, _ = self.raw.partition(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"retry-after:"):
                return int(line.partition(b":")[2])
        return None


@dataclass(slots=True)
class Burst:
    """What came of all."""

    replies: list[Reply] = field(default_factory=list)
    health: list[Reply] = field(default_factory=list)
    """Of /health, asked all the while on a connection that is kept."""

    def of(self, status: int) -> list[Reply]:
        return [reply for reply in self.replies if reply.status == status]


def run(port: int, request: bytes, count: int) -> Burst:
    """Send `request`, which asks for the connection to be closed, so many times."""
    return asyncio.run(_run(port, request, count))


async def _run(port: int, request: bytes, count: int) -> Burst:
    burst, is_over = Burst(), asyncio.Event()
    prober = await asyncio.open_connection("127.0.0.1", port)
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    while len(connections) < count:  # a listening socket's queue is bounded
        num_more = min(_CONNECTED_AT_ONCE, count - len(connections))
        connections += await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", port) for _ in range(num_more))
        )
    probing = asyncio.create_task(_probe(*prober, burst, is_over))
    burst.replies += await asyncio.gather(*(_ask(*each, request) for each in connections))
    is_over.set()
    await probing
    return burst


async def _probe(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    burst: Burst,
    is_over: asyncio.Event,
) -> None:
    while not is_over.is_set():
        asked_at = time.monotonic()
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        burst.health.append(Reply(head, time.monotonic() - asked_at))
        await asyncio.sleep(0.01)
    writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Reply:
    sent_at, raw, first_byte_s = time.monotonic(), b"", math.inf
    try:
        writer.write(request)
        raw = await reader.read(1 << 16)
        first_byte_s = time.monotonic() - sent_at
        raw += await reader.read()
    except ConnectionError:  # it was closed while we were still sending; what it said counts
        pass
    finally:
        writer.close()
    return Reply(raw, first_byte_s)
