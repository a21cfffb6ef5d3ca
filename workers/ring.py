"""The ring of wire 2: messages in shared memory from one writer to 1 to 16 readers, without a lock.

    +---------+-----+-----------+--------+-----+----------+--------+--------------+
    | chunk 0 |  …  | chunk n-1 | meta 0 |  …  | meta n-1 | closed | writer waits |
    +---------+-----+-----------+--------+-----+----------+--------+--------------+
       n × chunk_bytes             n × (1 + readers) bytes   a byte each

    meta  = | written | reader 0 | reader 1 | … |     a byte a flag, 0 or 1
    chunk = | sequence u64 | frames u32 | bytes u32 | length u32, … | frame 0 | frame 1 | … |
             sequence: of the message, from 0. bytes: of all of it. Frames start at multiples of 16.
             frames = 0: the message is too large for a chunk and comes through the side channel.

Every reader gets every message, in order. The writer alone writes chunks, `written` and the last
two bytes; a reader sets its own flag and writes nothing else, and the writer resets it only while
`written` is 0, when no reader touches it. So no byte is ever changed by two processes at once, and
no lock is needed, whose owner might die:

    writer                                        reader i
    wait until written = 0 or all readers = 1     wait until reader i = 0
    written = 0            clear                  and then   written = 1
    chunk = the message    write                  copy the message out of the chunk
    all readers = 0        reset the readers      reader i = 1
    written = 1            publish                if the writer waits: ring its bell
    ring the readers' bells

A chunk is used again once *all* have read it. The writer thus gets at most n messages ahead of its
slowest reader, and a reader that stands still stands in the way of all: `write` then says who it
is.

Memory order. Both columns need their lines to take effect, for the other process, in the order in
which they stand. That a reader looks at its own flag first belongs to it: a 0 there means that the
reset has begun, and from then on `written` is 0 until all is in place. In the other order it could
take the 1 of the chunk's last message for the new one, and set its flag in the middle of the reset.
x86-64 keeps the order: stores become visible in program order, and loads are not reordered (copies
so large that they stream past the caches end with a fence of their own). aarch64 does not, so there
is a fence between the steps, on every CPU, for 0.1 us each. Only clear and write have none between
them: until the reset every reader's own flag, or in the first round `written`, keeps it away from
the chunk. Only x86-64 is proved by running it; for aarch64 we have the argument at `_make_fence`.

Waiting. Nobody spins. Whoever cannot go on is parked on a bell (`wakeup`), which lies outside the
memory, together with the sentinels of its counterparts: a death ends the wait at once, and every
wait has a deadline. The words are those of pipes: EOFError when the writer has closed or died,
BrokenPipeError when a reader has died, TimeoutError. Readers park between messages, so they are
always rung. The writer hardly ever does, so it says when: it sets `writer waits`, and only then
looks once more and parks. A reader sets its flag before it looks whether the writer waits. Each
stores before it loads, with a fence between, so one of the two sees the other, and no wake-up is
lost.

Frames are copied out and the chunk is released before anybody looks at them, so what a message is
decoded to may live as long as it likes and a slow step does not hold a chunk. That is one copy on
each side, and the reader's own memory: nothing that happens to the ring later can change a message
that was read.

Used by `executor` and `process`, which put `rpc` messages into it. Knows nothing of their meaning,
takes nothing in a chunk on trust, and never unpickles.
"""

import functools
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.codec import Buffer
from engine.errors import WireError
from workers.shared_memory import SharedMemory
from workers.side_channel import SideChannel
from workers.wakeup import Bell, Waiter

logger = logging.getLogger(__name__)

MAX_READERS = 16
WARNING_INTERVAL_S = 60.0

_HEADER = struct.Struct("<QII")  # sequence, number of frames, bytes of all
_IN_SIDE_CHANNEL = 0
_ALIGNMENT = 16  # no array element is larger: a decoded view is an aligned array


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies, as drawn above."""

    num_chunks: int
    chunk_bytes: int
    num_readers: int

    def __post_init__(self) -> None:
        assert self.num_chunks >= 1
        assert self.chunk_bytes >= _HEADER.size
        assert 1 <= self.num_readers <= MAX_READERS

    def chunk_at(self, index: int) -> int:
        return index * self.chunk_bytes

    def written_at(self, index: int) -> int:
        """The readers' flags follow, a byte each."""
        return self.num_chunks * self.chunk_bytes + index * (1 + self.num_readers)

    def places(self) -> list[tuple[int, int]]:
        """Of each chunk: where it is, and its flags. Worked out once, not for every message."""
        return [(self.chunk_at(index), self.written_at(index)) for index in range(self.num_chunks)]

    @property
    def closed_at(self) -> int:
        return self.written_at(self.num_chunks)

    @property
    def waits_at(self) -> int:
        """Of the writer."""
        return self.closed_at + 1

    @property
    def num_bytes(self) -> int:
        return self.waits_at + 1


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the other end."""

    name: str
    """As an operator knows it: title, rank and pid."""

    sentinel: int | None = None
    """A descriptor that becomes readable when the process ends."""


class Ring:
    """The memory and the bells: made by the parent, handed down to its children at their start.

    Then one process takes the end that writes, and each of the others an end that reads.
    """

    def __init__(
        self, layout: Layout, memory: SharedMemory, writer_bell: Bell, reader_bells: Sequence[Bell]
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.writer_bell = writer_bell
        self.reader_bells = tuple(reader_bells)

    @classmethod
    def create(cls, *, num_chunks: int, chunk_bytes: int, num_readers: int) -> "Ring":
        """Reserve the memory. Raises ConfigError where there is not enough."""
        layout = Layout(num_chunks, chunk_bytes, num_readers)
        memory = SharedMemory.reserve(layout.num_bytes)
        return cls(layout, memory, Bell.create(), [Bell.create() for _ in range(num_readers)])

    def close(self) -> None:
        """Let go of the memory in this process. The other processes keep theirs."""
        self.memory.close()
        for bell in (self.writer_bell, *self.reader_bells):
            bell.close()


class RingWriter:
    """The one end that writes. For one thread at a time.

    Args:
        ring: the ring; nobody else writes to it.
        readers: who reads, by index.
        side_channels: one to each reader, for messages that are too large for a chunk. Without
            them, such messages are refused.
        warning_interval_s: how often a full ring is reported.
    """

    def __init__(
        self,
        ring: Ring,
        readers: Sequence[Peer],
        side_channels: Sequence[SideChannel] = (),
        warning_interval_s: float = WARNING_INTERVAL_S,
    ) -> None:
        assert len(readers) == ring.layout.num_readers
        self.num_written = 0
        """Messages so far, and so the sequence of the next one."""
        self._layout = ring.layout
        self._bytes = ring.memory.bytes
        self._reader_bells = ring.reader_bells
        self._readers = readers
        self._side_channels = side_channels
        self._warning_interval_s = warning_interval_s
        self._places = ring.layout.places()
        self._waits_at = ring.layout.waits_at
        self._labels = [""] * ring.layout.num_chunks
        self._fence = _make_fence()
        self._none_read = bytes(ring.layout.num_readers)
        self._all_read = b"\x01" * ring.layout.num_readers
        sentinels = [peer.sentinel for peer in readers if peer.sentinel is not None]
        self._waiter = Waiter([ring.writer_bell], sentinels)

    def write(self, frames: Sequence[Buffer], label: str, *, timeout_s: float) -> None:
        """Write a message, waiting for room if need be.

        Args:
            frames: what `codec.Encoder` returns; they are copied.
            label: names the message to operators if a reader does not read it.
            timeout_s: how long to wait for room.

        Raises:
            BrokenPipeError: a reader has ended, and there is no room or the message is too large
                for a chunk.
            TimeoutError: there is no room; the message says who holds it back, and with what.
            WireError: the message is larger than any wire of ours takes.
        """
        began = time.monotonic()
        warn_after_s = self._warning_interval_s
        while not self.try_write(frames, label):
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s:
                raise TimeoutError(
                    f"no free chunk for {label} in {waited_s:.0f} s: {self._holdup()}"
                )
            if waited_s >= warn_after_s:
                # The first words are what people search the web for.
                logger.warning(
                    "No available shared memory broadcast block found in %.0f s for %s: %s",
                    waited_s,
                    label,
                    self._holdup(),
                )
                warn_after_s += self._warning_interval_s
            if self._park(min(timeout_s, warn_after_s) - waited_s) and not self._has_room():
                raise BrokenPipeError(f"no free chunk for {label}, and a reader has ended")

    def try_write(self, frames: Sequence[Buffer], label: str = "") -> bool:
        """Write a message if there is room for it now."""
        if not self._has_room():
            return False
        index = self.num_written % len(self._places)
        chunk, written = self._places[index]
        memory, fence = self._bytes, self._fence
        head, places = self._arrange(frames)

        fence()
        memory[written] = 0  # clear
        memory[chunk : chunk + len(head)] = head  # write
        for (start, end), frame in zip(places, frames, strict=bool(places)):
            memory[chunk + start : chunk + end] = frame
        fence()
        memory[written + 1 : written + 1 + len(self._none_read)] = self._none_read  # reset
        fence()
        memory[written] = 1  # publish

        self._labels[index] = label
        self.num_written += 1
        for bell in self._reader_bells:
            bell.ring()
        return True

    def unread_by(self, sequence: int) -> list[str]:
        """Names of the readers that have not read a message of the ring. For any thread."""
        if not 0 < self.num_written - sequence <= self._layout.num_chunks:
            return []  # overwritten, so all have read it; or not there yet
        first_reader = self._layout.written_at(sequence % self._layout.num_chunks) + 1
        flags = self._bytes[first_reader : first_reader + self._layout.num_readers]
        return [peer.name for peer, flag in zip(self._readers, flags, strict=True) if flag != 1]

    def last_read_by(self, reader: int) -> str | None:
        """Label of the newest message of the ring that a reader has read. For any thread."""
        oldest = max(0, self.num_written - self._layout.num_chunks)
        for sequence in range(self.num_written - 1, oldest - 1, -1):
            index = sequence % self._layout.num_chunks
            if self._bytes[self._layout.written_at(index) + 1 + reader] == 1:
                return self._labels[index]
        return None

    def _holdup(self) -> str:
        """Who has not read the oldest message in the ring, in words."""
        oldest = self.num_written - self._layout.num_chunks
        waits_for = " and ".join(self.unread_by(oldest))
        return f"{self._labels[oldest % self._layout.num_chunks]} is not read by {waits_for}"

    def close(self) -> None:
        """Tell the readers that nothing more comes. They still read what is there."""
        self._fence()
        self._bytes[self._layout.closed_at] = 1
        for bell in self._reader_bells:
            bell.ring()

    def _park(self, timeout_s: float) -> bool:
        """Wait until a reader has read something, and return whether one has ended."""
        self._bytes[self._waits_at] = 1
        self._fence()
        try:
            return not self._has_room() and self._waiter.wait(timeout_s)
        finally:
            self._bytes[self._waits_at] = 0

    def _has_room(self) -> bool:
        _, written = self._places[self.num_written % len(self._places)]
        flags = self._bytes[written + 1 : written + 1 + len(self._all_read)]
        return flags == self._all_read or self._bytes[written] == 0

    def _arrange(self, frames: Sequence[Buffer]) -> tuple[bytes, list[tuple[int, int]]]:
        """Return the head of the chunk and where the frames go in it. What does not fit goes out by
        the side, and has no place."""
        assert frames, "a message has a body"
        lengths = [len(frame) for frame in frames]
        places = _place(lengths)
        num_bytes = places[-1][1]
        if num_bytes > self._layout.chunk_bytes:
            # Sent before it is announced: whoever reads the announcement need not wait for long.
            SideChannel.send_to_all(self._side_channels, self.num_written, frames)
            return _HEADER.pack(self.num_written, _IN_SIDE_CHANNEL, _HEADER.size), []
        head = _head(len(frames)).pack(self.num_written, len(frames), num_bytes, *lengths)
        return head, places


class RingReader:
    """One of the ends that read. For one thread at a time.

    Args:
        ring: the ring.
        index: which reader this is; nobody else takes this one.
        writer: who writes.
        side_channel: brings the messages that are too large for a chunk.
    """

    def __init__(
        self, ring: Ring, index: int, writer: Peer, side_channel: SideChannel | None = None
    ) -> None:
        self.num_read = 0
        """Messages so far, and so the sequence of the next one."""
        self._layout = ring.layout
        self._closed_at = ring.layout.closed_at
        self._writer_waits_at = ring.layout.waits_at
        self._places = ring.layout.places()
        self._bytes = ring.memory.bytes
        self._index = index
        self._writer = writer
        self._writer_bell = ring.writer_bell
        self._side_channel = side_channel
        self._fence = _make_fence()
        sentinels = [] if writer.sentinel is None else [writer.sentinel]
        self._waiter = Waiter([ring.reader_bells[index]], sentinels)

    def read(self, *, timeout_s: float) -> Sequence[Buffer]:
        """Wait for the next message and return its frames, which are the caller's own.

        Raises:
            EOFError: the writer has closed or ended, and all it has written is read.
            TimeoutError: nothing came.
            WireError: what came is no message.
        """
        deadline = time.monotonic() + timeout_s
        has_ended = False
        while (frames := self.try_read()) is None:
            if has_ended:
                raise EOFError(f"{self._writer.name} writes no more")
            if has_ended := self._is_closed():
                continue  # one more look: what was written before the end is still read
            if (patience_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"nothing from {self._writer.name} in {timeout_s:.0f} s")
            has_ended = self._waiter.wait(patience_s)
        return frames

    def try_read(self) -> Sequence[Buffer] | None:
        """Return the next message's frames if it is there."""
        chunk, written = self._places[self.num_read % len(self._places)]
        own = written + 1 + self._index
        memory, fence = self._bytes, self._fence
        if memory[own] == 1:
            return None
        fence()
        if memory[written] != 1:
            return None
        fence()
        try:
            return self._take(chunk)
        finally:  # also of a broken message: a reader that fails does not hold up the others
            fence()
            memory[own] = 1
            self.num_read += 1
            fence()
            if memory[self._writer_waits_at] != 0:
                self._writer_bell.ring()

    def _is_closed(self) -> bool:
        is_closed = self._bytes[self._closed_at] == 1
        if is_closed:
            self._fence()
        return is_closed

    def _take(self, start: int) -> Sequence[Buffer]:
        sequence, num_frames, num_bytes = _HEADER.unpack_from(self._bytes, start)
        if sequence != self.num_read:
            raise WireError(f"message {sequence} in the chunk where {self.num_read} is due")
        if not _HEADER.size <= num_bytes <= self._layout.chunk_bytes:
            raise WireError(f"{num_bytes} bytes in a chunk of {self._layout.chunk_bytes}")
        if num_frames == _IN_SIDE_CHANNEL:
            if self._side_channel is None:
                raise WireError("a message in a side channel that is not there")
            return self._side_channel.receive(sequence)
        return _split(self._bytes[start : start + num_bytes], num_frames)


@functools.lru_cache
def _head(num_frames: int) -> struct.Struct:
    """The header and the lengths of so many frames."""
    return struct.Struct(f"{_HEADER.format}{num_frames}I")


def _place(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each frame begins and ends in its message, which ends with the last of them."""
    places = []
    end = _HEADER.size + 4 * len(lengths)
    for length in lengths:
        start = (end + _ALIGNMENT - 1) & -_ALIGNMENT
        end = start + length
        places.append((start, end))
    return places


def _split(message: bytes, num_frames: int) -> list[Buffer]:
    """Return a message's frames, as views of it."""
    if num_frames > (len(message) - _HEADER.size) // 4:
        raise WireError(f"{num_frames} frames in {len(message)} bytes")
    places = _place(_head(num_frames).unpack_from(message)[3:])
    if (end := places[-1][1]) != len(message):
        raise WireError(f"frames of {end} bytes in a message of {len(message)}")
    view = memoryview(message)
    return [view[start:end] for start, end in places]


def _make_fence() -> Callable[[], None]:
    """Return what orders memory: what stands before its call takes effect before what follows it.

    Python has no fence, but its locks have half of one each way: releasing orders what was before,
    acquiring what comes after, and a release followed by an acquire is ordered itself (on aarch64,
    the store-release and load-acquire instructions they are made of are). So the lock is kept and,
    for a fence, let go and taken again: nobody else wants it. The usual acquire and then release
    would be no fence, since both neighbours may move in between.
    """
    lock = threading.Lock()
    release, acquire = lock.release, lock.acquire
    acquire()

    def fence() -> None:
        release()
        acquire()

    return fence
