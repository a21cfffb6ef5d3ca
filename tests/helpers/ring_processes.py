"""Real processes at the other end of a ring, for tests. Each says on its pipe what it saw."""

import contextlib
import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import zmq

from workers.ring import Peer, Ring, RingReader, RingWriter
from workers.side_channel import SideChannel

_spawn = multiprocessing.get_context("spawn")
_FILLER = [bytes([i]) * (i % 40) for i in range(256)]

PATIENCE_S = 60.0
LARGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Child:
    """A child process, as the peer of a ring, and the pipe to it."""

    process: BaseProcess
    pipe: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def peer(self) -> Peer:
        return Peer(f"{self.process.name} pid={self.pid}", self.process.sentinel)

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), f"no word from {self.process.name}"
        return self.pipe.recv()


@contextlib.contextmanager
def start(name: str, target: Callable[..., None], *args: object) -> Iterator[Child]:
    """Run `target(pipe, *args)` in a child process, and end it with the block."""
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=target, args=(theirs, *args), name=name)
    process.start()
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def content(sequence: int) -> bytes:
    """The small message of this number: 8 to 47 bytes."""
    return sequence.to_bytes(8, "little") + _FILLER[sequence & 255]


def mixed_content(sequence: int) -> list[bytes]:
    """Frames of this number's message; every seventh is larger than a small chunk, by far: if
    somebody kept them all, it would show."""
    seed = hashlib.sha256(sequence.to_bytes(8, "little")).digest()
    num_bytes = LARGE_BYTES + seed[0] if sequence % 7 == 0 else seed[0]
    return [seed, (seed * (num_bytes // 32 + 1))[:num_bytes]]


def read_contents(pipe: Connection, ring: Ring, index: int, num_messages: int) -> None:
    """Read so many messages and report how many were right."""
    reader = RingReader(ring, index, Peer("writer"))
    num_right = 0
    for sequence in range(num_messages):
        (frame,) = reader.read(timeout_s=PATIENCE_S)
        num_right += frame == content(sequence)
    pipe.send(num_right)


def read_mixed(
    pipe: Connection, ring: Ring, index: int, address: str, num_messages: int, pause_every: int
) -> None:
    """The same for `mixed_content`, with a short pause every so many messages."""
    with (
        zmq.Context() as context,
        contextlib.closing(SideChannel.connect(context, address)) as side,
    ):
        reader = RingReader(ring, index, Peer("writer"), side)
        num_right = 0
        for sequence in range(num_messages):
            if sequence % pause_every == 0:
                time.sleep(0.001)
            frames = [bytes(frame) for frame in reader.read(timeout_s=PATIENCE_S)]
            num_right += frames == mixed_content(sequence)
    pipe.send(num_right)


def read_then_linger(pipe: Connection, ring: Ring, index: int, num_messages: int) -> None:
    """Read so many messages, say so, and then do nothing until told to read on to the end."""
    reader = RingReader(ring, index, Peer("writer"))
    for _ in range(num_messages):
        reader.read(timeout_s=PATIENCE_S)
    pipe.send("read")
    pipe.recv()
    with contextlib.suppress(EOFError):
        while True:
            reader.read(timeout_s=PATIENCE_S)
    pipe.send("end")


def write_then_linger(pipe: Connection, ring: Ring, num_messages: int) -> None:
    """Write so many messages, say so, and wait."""
    writer = RingWriter(ring, [Peer("reader")] * ring.layout.num_readers)
    for sequence in range(num_messages):
        writer.write([content(sequence)], "", timeout_s=PATIENCE_S)
    pipe.send("written")
    pipe.recv()
