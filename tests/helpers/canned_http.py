"""An HTTP server that sends what the test has written down, for tests of clients."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

TIMEOUT_S = 10.0


@dataclass
class CannedServer:
    replies: Sequence[Sequence[bytes]]
    """By request, in the order of arrival: what is sent, flushed after each part. An empty reply
    ends the connection, without a word."""

    port: int = 0
    bodies: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    max_in_flight: int = 0
    _in_flight: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    _stop: Callable[[], object] = field(default=lambda: None)

    async def run(self, is_up: threading.Event) -> None:
        """Serve until `stop` is called from another thread."""
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        self._stop = partial(loop.call_soon_threadsafe, end.set)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        is_up.set()
        await end.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    def stop(self) -> None:
        self._stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        try:
            while head := await _head(reader):
                length = sum(
                    int(line.partition(b":")[2])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                )
                self.bodies.append(await reader.readexactly(length))
                if not await self._reply(self.replies[len(self.bodies) - 1], writer):
                    return
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)  # so that it is closed before the loop is

    async def _reply(self, parts: Sequence[bytes], writer: asyncio.StreamWriter) -> bool:
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.002)  # so that the client reads the parts one by one
        self._in_flight -= 1
        return bool(parts)


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@contextmanager
def canned_server(*replies: Sequence[bytes]) -> Iterator[CannedServer]:
    """Serve on a thread for as long as the block."""
    canned = CannedServer(replies)
    is_up = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(canned.run(is_up),), name="canned")
    thread.start()
    try:
        assert is_up.wait(TIMEOUT_S)
        yield canned
    finally:
        canned.stop()
        thread.join(TIMEOUT_S)


def stream(*events: str, status: str = "200 OK", ends: bool = True) -> list[bytes]:
    """A reply: the head, then each event in a chunk of its own, and [DONE]."""
    parts = [f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()]
    parts += [chunk(f"data: {event}\n\n".encode()) for event in (*events, "[DONE]")]
    return [*parts, chunk(b"")] if ends else parts


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)
