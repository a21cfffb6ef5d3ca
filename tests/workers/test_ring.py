"""The ring inside one process: its scenarios, its bytes, its order. `test_ring_processes` has the
rest."""

import contextlib
import logging
import os
import pickle
import re
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import WireError
from workers import rpc
from workers.ring import MAX_READERS, Layout, Peer, Ring, RingReader, RingWriter
from workers.shared_memory import SharedMemory
from workers.wakeup import Bell


@contextlib.contextmanager
def open_ring(
    *,
    num_chunks: int,
    num_readers: int = 1,
    chunk_bytes: int = 4096,
    warning_interval_s: float = 60,
) -> Iterator[tuple[Ring, RingWriter, list[RingReader]]]:
    ring = Ring.create(num_chunks=num_chunks, chunk_bytes=chunk_bytes, num_readers=num_readers)
    peers = [Peer(f"worker {index}") for index in range(num_readers)]
    with contextlib.closing(ring):
        writer = RingWriter(ring, peers, warning_interval_s=warning_interval_s)
        yield ring, writer, [RingReader(ring, i, Peer("core")) for i in range(num_readers)]


def read_one(reader: RingReader) -> bytes | None:
    """The only frame of the next message, if it is there."""
    frames = reader.try_read()
    if frames is None:
        return None
    (frame,) = frames
    return bytes(frame)


# ------------------------------------------------------------------ the textbook scenarios


def test_third_message_waits_until_both_readers_have_read_the_first() -> None:
    """Two chunks, two readers: one reader alone does not free a chunk."""
    with open_ring(num_chunks=2, num_readers=2) as (_, writer, (first, second)):
        assert writer.try_write([b"step-1"])
        assert writer.try_write([b"step-2"])
        assert not writer.try_write([b"step-3"])

        assert read_one(first) == b"step-1"
        assert not writer.try_write([b"step-3"])

        assert read_one(second) == b"step-1"
        assert writer.try_write([b"step-3"])
        assert [read_one(second), read_one(second), read_one(second)] == [
            b"step-2",
            b"step-3",
            None,
        ]


def test_ring_of_four_refuses_the_fifth_message() -> None:
    """A writer gets as many messages ahead of its slowest reader as there are chunks."""
    with open_ring(num_chunks=4) as (_, writer, (reader,)):
        assert [writer.try_write([b"%d" % i]) for i in range(5)] == [True] * 4 + [False]
        assert read_one(reader) == b"0"
        assert writer.try_write([b"4"])


def test_reader_sees_each_message_once() -> None:
    """A reader that is ahead of the writer gets nothing, and not the old message again."""
    with open_ring(num_chunks=2) as (_, writer, (reader,)):
        assert read_one(reader) is None
        writer.try_write([b"once"])
        assert [read_one(reader), read_one(reader)] == [b"once", None]


@given(
    num_chunks=st.integers(1, 5),
    num_readers=st.integers(1, MAX_READERS),
    acts=st.lists(st.integers(0, MAX_READERS), max_size=120),
)
@settings(max_examples=200)
def test_any_interleaving_behaves_like_a_bounded_list(
    num_chunks: int, num_readers: int, acts: list[int]
) -> None:
    """Whoever acts when: a write succeeds iff the slowest reader lags by less than the chunks, and
    each reader gets all messages in order."""
    written: list[bytes] = []
    num_read = [0] * num_readers
    with open_ring(num_chunks=num_chunks, num_readers=num_readers) as (_, writer, readers):
        for act in acts:
            if act >= num_readers:
                has_room = len(written) - min(num_read) < num_chunks
                message = b"message %d" % len(written)
                assert writer.try_write([message]) == has_room
                written += [message] * has_room
            else:
                expected = written[num_read[act]] if num_read[act] < len(written) else None
                assert read_one(readers[act]) == expected
                num_read[act] += expected is not None


# ------------------------------------------------------------------------------ its bytes


def test_chunks_come_first_and_then_a_byte_for_each_flag() -> None:
    """The layout is the drawn one: chunks, `written` and the flags of each, and the end."""
    layout = Layout(num_chunks=3, chunk_bytes=64, num_readers=2)
    assert [layout.chunk_at(i) for i in range(3)] == [0, 64, 128]
    assert [layout.written_at(i) for i in range(3)] == [192, 195, 198]
    assert (layout.closed_at, layout.waits_at, layout.num_bytes) == (201, 202, 203)

    with open_ring(num_chunks=3, chunk_bytes=64, num_readers=2) as (ring, writer, (_, second)):
        writer.try_write([b"a"])
        writer.try_write([b"b"])
        second.try_read()
        assert ring.memory.bytes[192:202] == bytes([1, 0, 1, 1, 0, 0, 0, 0, 0, 0])


def test_reader_changes_no_byte_but_its_own_flag() -> None:
    """What makes the ring safe without a lock."""
    with open_ring(num_chunks=2, num_readers=3) as (ring, writer, readers):
        writer.try_write([b"hello"])
        before = ring.memory.bytes[:]
        readers[1].try_read()
        after = ring.memory.bytes[:]
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert changed == [ring.layout.written_at(0) + 1 + 1]


class RecordingBytes(bytearray):
    """Memory that notes where it is written to, and with what."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.stores: list[tuple[int, bytes]] = []

    def __setitem__(self, key: object, value: object) -> None:
        start = key.start if isinstance(key, slice) else key
        assert isinstance(start, int)
        data = bytes([value]) if isinstance(value, int) else bytes(cast(bytes, value))
        self.stores.append((start, data))
        super().__setitem__(key, value)  # type: ignore[call-overload]


@dataclass
class RecordingMemory:
    bytes: RecordingBytes = field(default_factory=lambda: RecordingBytes(1000))


def test_writer_clears_then_writes_then_resets_then_publishes() -> None:
    """The order of the stores is the protocol: a reader in between must never be misled."""
    layout = Layout(num_chunks=1, chunk_bytes=64, num_readers=2)
    memory = RecordingMemory()
    bells = [Bell.create() for _ in range(3)]
    ring = Ring(layout, cast(SharedMemory, memory), bells[0], bells[1:])
    writer = RingWriter(ring, [Peer("a"), Peer("b")])

    writer.try_write([b"message"])

    places = [start for start, _ in memory.bytes.stores]
    assert places == [64, 0, 32, 65, 64]  # written, head, frame, readers, written
    assert [data for start, data in memory.bytes.stores if start >= 64] == [b"\0", b"\0\0", b"\1"]
    for bell in bells:
        bell.close()


@given(st.lists(st.binary(max_size=700), min_size=1, max_size=6))
def test_frames_arrive_as_they_were_sent(frames: list[bytes]) -> None:
    """Any number of frames of any size, also empty ones."""
    with open_ring(num_chunks=1, chunk_bytes=8192) as (_, writer, (reader,)):
        assert writer.try_write(frames)
        received = reader.try_read()
        assert received is not None
        assert [bytes(frame) for frame in received] == frames


def test_what_was_read_is_the_readers_own() -> None:
    """A message outlives its chunk: later messages in the same memory do not change it."""
    with open_ring(num_chunks=1) as (ring, writer, (reader,)):
        writer.try_write([b"first", memoryview(b"array")])
        frames = reader.try_read()
        writer.try_write([b"other", memoryview(b"stuff")])
        ring.memory.bytes[:4096] = b"\xff" * 4096
        assert frames is not None
        assert [bytes(frame) for frame in frames] == [b"first", b"array"]


def test_chunks_are_used_again_lap_after_lap() -> None:
    """A thousand laps, in order, with every reader a little behind."""
    with open_ring(num_chunks=3, num_readers=2) as (_, writer, readers):
        for i in range(3000):
            assert writer.try_write([b"%d" % i])
            if i >= 2:
                assert [read_one(reader) for reader in readers] == [b"%d" % (i - 2)] * 2


def test_sixteen_readers_get_every_message() -> None:
    """The most readers a ring takes; a seventeenth is our own mistake."""
    with open_ring(num_chunks=2, num_readers=MAX_READERS) as (_, writer, readers):
        writer.try_write([b"to all"])
        assert {read_one(reader) for reader in readers} == {b"to all"}
    with pytest.raises(AssertionError):
        Layout(num_chunks=2, chunk_bytes=64, num_readers=MAX_READERS + 1)


# ------------------------------------------------------------------------------ trust


def forge(ring: Ring, chunk: bytes) -> None:
    """Publish these bytes in chunk 0, as a process that has got hold of the memory could."""
    ring.memory.bytes[: len(chunk)] = chunk
    ring.memory.bytes[ring.layout.written_at(0)] = 1


@pytest.mark.row("S-02")
@given(st.binary(max_size=300))
def test_hostile_chunk_is_refused_and_released(chunk: bytes) -> None:
    """No bytes in a chunk do more than raise WireError, and the writer can go on."""
    with open_ring(num_chunks=1, chunk_bytes=300) as (ring, writer, (reader,)):
        forge(ring, chunk)
        with contextlib.suppress(WireError):
            for frame in reader.try_read() or ():
                assert len(frame) <= 300
        assert writer.try_write([b"next"])


@pytest.mark.row("S-51")
@pytest.mark.parametrize(
    "header",
    [
        (1, 1, 20),  # another message than is due
        (0, 1, 301),  # longer than the chunk
        (0, 1, 15),  # shorter than its own header
        (0, 1 << 31, 300),  # more lengths than there is room for
        (0, 0, 16),  # in a side channel that does not exist
    ],
)
def test_broken_header_raises(header: tuple[int, int, int]) -> None:
    """Every number in a chunk is checked before it is used."""
    with open_ring(num_chunks=1, chunk_bytes=300) as (ring, _, (reader,)):
        sequence, num_frames, num_bytes = header
        forge(
            ring,
            sequence.to_bytes(8, "little")
            + num_frames.to_bytes(4, "little")
            + num_bytes.to_bytes(4, "little"),
        )
        with pytest.raises(WireError):
            reader.try_read()


class Exploit:
    """Unpickling this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


@pytest.mark.row("S-02")
def test_pickle_in_a_chunk_runs_nothing(tmp_path: os.PathLike[str]) -> None:
    """A hostile pickle, well framed, is an undecodable call and has no effect (CVE-2024-11041)."""
    trap = os.path.join(tmp_path, "trap")
    with open_ring(num_chunks=1) as (_, writer, (reader,)):
        writer.try_write([pickle.dumps(Exploit(trap))])
        frames = reader.try_read()
        assert frames is not None
        with pytest.raises(WireError):
            rpc.call_decoder().decode(frames)
    assert not os.path.exists(trap)


def test_message_without_a_way_is_refused_and_the_ring_goes_on() -> None:
    """Larger than a chunk, and no side channel: the writer hears it, the readers do not."""
    with open_ring(num_chunks=1, chunk_bytes=64) as (_, writer, (reader,)):
        with pytest.raises(WireError, match="100 bytes"):
            writer.try_write([bytes(100)])
        assert writer.try_write([b"small"])
        assert read_one(reader) == b"small"


# ------------------------------------------------------------------------------ waiting


def test_full_ring_is_reported_with_rank_and_call(caplog: pytest.LogCaptureFixture) -> None:
    """At every interval one line, in the words people search for, then who and what; and at the end
    of the time an error that says the same."""
    caplog.set_level(logging.WARNING)
    with open_ring(num_chunks=2, num_readers=2, warning_interval_s=0.05) as (_, writer, readers):
        writer.try_write([b""], "execute_model step 7")
        writer.try_write([b""], "execute_model step 8")
        readers[0].try_read()
        holdup = "execute_model step 7 is not read by worker 1"
        with pytest.raises(TimeoutError, match=f"no free chunk for profile in 0 s: {holdup}"):
            writer.write([b""], "profile", timeout_s=0.18)
    lines = [record.message for record in caplog.records]
    assert 1 <= len(lines) <= 3  # fewer where this process was kept waiting
    for line in lines:
        assert line.startswith("No available shared memory broadcast block found")
        assert line.endswith(holdup)


def test_reading_has_a_deadline() -> None:
    """Nothing comes: TimeoutError, which names who was to write."""
    with open_ring(num_chunks=1) as (_, _, (reader,)):
        with pytest.raises(TimeoutError, match="nothing from core"):
            reader.read(timeout_s=0.01)


def test_what_was_written_before_the_end_is_still_read() -> None:
    """Closing ends a ring after its last message, also a full one."""
    with open_ring(num_chunks=1) as (_, writer, (reader,)):
        writer.try_write([b"last"])
        writer.close()
        assert [bytes(frame) for frame in reader.read(timeout_s=1)] == [b"last"]
        with pytest.raises(EOFError, match="core writes no more"):
            reader.read(timeout_s=1)


def test_parked_reader_uses_no_cpu() -> None:
    """Waiting is not spinning."""
    with open_ring(num_chunks=1) as (_, _, (reader,)):
        began_s = time.thread_time()
        with pytest.raises(TimeoutError):
            reader.read(timeout_s=0.3)
        assert time.thread_time() - began_s < 0.01


def test_parked_reader_sleeps_once_however_long_it_waits() -> None:
    """It looks at nothing by a timer: the kernel switches away from it once, or there would be many
    wake-ups for each message."""

    def num_sleeps() -> int:
        status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
        return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)[0])

    with open_ring(num_chunks=1) as (_, _, (reader,)):
        before = num_sleeps()
        with pytest.raises(TimeoutError):
            reader.read(timeout_s=0.3)
        assert num_sleeps() - before <= 3


def test_a_message_rings_each_reader_once_and_the_writer_only_if_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each ring is a call into the kernel, and may wake somebody for nothing."""
    rung: list[Bell] = []
    with open_ring(num_chunks=1, num_readers=2) as (ring, writer, readers):
        monkeypatch.setattr(Bell, "ring", lambda bell: rung.append(bell))
        writer.try_write([b"first"])
        assert rung == list(ring.reader_bells)
        for reader in readers:
            reader.try_read()
        assert rung == list(ring.reader_bells)

        writer.try_write([b"second"])
        rung.clear()
        with pytest.raises(TimeoutError):
            writer.write([b"third"], "third", timeout_s=0.01)
        assert ring.memory.bytes[ring.layout.waits_at] == 0  # it has given up
        ring.memory.bytes[ring.layout.waits_at] = 1  # as while it waits
        readers[0].try_read()
        assert rung == [ring.writer_bell]


def test_bytes_are_copied_once_each_way() -> None:
    """Into the chunk and out of it: no copy is made on the way, which would be memory."""
    payload = bytes(1 << 20)
    with open_ring(num_chunks=1, chunk_bytes=2 << 20) as (_, writer, (reader,)):
        tracemalloc.start()
        try:
            writer.try_write([payload])
            _, written_peak = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            frames = reader.try_read()
            _, read_peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert frames is not None
    assert written_peak < 16 << 10
    assert len(payload) <= read_peak < len(payload) + (16 << 10)


def test_writer_knows_how_far_its_readers_are() -> None:
    """What the executor says about a worker that has died or lags behind."""
    with open_ring(num_chunks=2, num_readers=2) as (_, writer, (first, _)):
        assert writer.last_read_by(0) is None
        for step in range(2):
            writer.try_write([b""], f"step {step}")
        first.try_read()
        assert (writer.last_read_by(0), writer.last_read_by(1)) == ("step 0", None)
        assert writer.unread_by(0) == ["worker 1"]
        assert writer.unread_by(1) == ["worker 0", "worker 1"]
        assert writer.unread_by(2) == []
