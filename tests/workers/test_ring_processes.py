"""The ring between real processes: speed, order, deaths and stops."""

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import zmq

from tests.helpers import ring_processes
from tests.helpers.ring_processes import PATIENCE_S, content, mixed_content
from workers.ring import Ring, RingReader, RingWriter
from workers.side_channel import SideChannel

NUM_STRESS_MESSAGES = 1_000_000


@pytest.mark.timeout(400)  # 15 s on two free cores, five times that among eight busy processes
def test_a_million_small_messages_arrive_intact() -> None:
    """Two processes at full speed, a hundred thousand laps: each message is right."""
    with contextlib.closing(Ring.create(num_chunks=10, chunk_bytes=128, num_readers=1)) as ring:
        with ring_processes.start(
            "reader", ring_processes.read_contents, ring, 0, NUM_STRESS_MESSAGES
        ) as reader:
            writer = RingWriter(ring, [reader.peer])
            for sequence in range(NUM_STRESS_MESSAGES):
                writer.write([content(sequence)], "", timeout_s=PATIENCE_S)
            assert reader.hear() == NUM_STRESS_MESSAGES


@pytest.mark.row("F-28")
def test_large_messages_keep_their_place_among_small_ones(tmp_path: Path) -> None:
    """Ten thousand messages, every seventh through the side channel, two slow readers: order and
    content are exact, and nobody keeps more of the 90 MiB than a few messages."""
    num_messages, num_readers = 10_000, 2
    memory: list[int] = []
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(
            contextlib.closing(Ring.create(num_chunks=4, chunk_bytes=512, num_readers=num_readers))
        )
        context = stack.enter_context(zmq.Context())
        sides, readers = [], []
        for index in range(num_readers):
            address = f"ipc://{tmp_path}/{index}"
            sides.append(
                stack.enter_context(contextlib.closing(SideChannel.bind(context, address)))
            )
            readers.append(
                stack.enter_context(
                    ring_processes.start(
                        f"reader {index}",
                        ring_processes.read_mixed,
                        *(ring, index, address, num_messages, 50 + 50 * index),
                    )
                )
            )
        assert all(side.confirm(PATIENCE_S) for side in sides)
        writer = RingWriter(ring, [reader.peer for reader in readers], sides)
        for sequence in range(num_messages):
            writer.write(mixed_content(sequence), "", timeout_s=PATIENCE_S)
            if sequence % 500 == 499:
                pids = (os.getpid(), *(reader.pid for reader in readers))
                memory.append(sum(psutil.Process(pid).memory_info().rss for pid in pids))
        assert [reader.hear() for reader in readers] == [num_messages] * num_readers
    assert max(memory) - memory[0] < 16 << 20


def test_slow_reader_holds_the_writer_back() -> None:
    """The writer is parked while the ring is full, and goes on when its slowest reader does."""
    with contextlib.closing(Ring.create(num_chunks=2, chunk_bytes=128, num_readers=1)) as ring:
        with ring_processes.start("reader", ring_processes.read_then_linger, ring, 0, 1) as reader:
            writer = RingWriter(ring, [reader.peer])
            for sequence in range(3):
                writer.write([content(sequence)], "", timeout_s=PATIENCE_S)
            assert reader.hear() == "read"
            with pytest.raises(TimeoutError):
                writer.write([b"fourth"], "", timeout_s=0.05)
            reader.pipe.send("read on")
            writer.write([b"fourth"], "", timeout_s=PATIENCE_S)
            writer.close()
            assert reader.hear() == "end"


def test_dead_reader_ends_the_writers_wait_at_once() -> None:
    """A reader killed before it reads is noticed in far less than any deadline."""
    with contextlib.closing(Ring.create(num_chunks=1, chunk_bytes=128, num_readers=1)) as ring:
        with ring_processes.start("reader", ring_processes.read_then_linger, ring, 0, 1) as reader:
            writer = RingWriter(ring, [reader.peer])
            writer.write([b"read"], "", timeout_s=PATIENCE_S)
            assert reader.hear() == "read"
            writer.write([b"never read"], "", timeout_s=PATIENCE_S)
            os.kill(reader.pid, signal.SIGKILL)
            began_s = time.monotonic()
            with pytest.raises(BrokenPipeError):
                writer.write([b"no room"], "", timeout_s=PATIENCE_S)
            assert time.monotonic() - began_s < 2


def test_stopped_reader_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """SIGSTOP: the warning has its name, its pid and the call it has not read. After SIGCONT all
    goes on."""
    caplog.set_level(logging.WARNING)
    with contextlib.closing(Ring.create(num_chunks=1, chunk_bytes=128, num_readers=1)) as ring:
        with ring_processes.start("rank 1", ring_processes.read_then_linger, ring, 0, 1) as reader:
            writer = RingWriter(ring, [reader.peer], warning_interval_s=0.1)
            writer.write([b""], "step 1", timeout_s=PATIENCE_S)
            assert reader.hear() == "read"
            os.kill(reader.pid, signal.SIGSTOP)
            reader.pipe.send("read on")
            writer.write([b""], "step 2", timeout_s=PATIENCE_S)
            with pytest.raises(TimeoutError):
                writer.write([b""], "step 3", timeout_s=0.15)
            os.kill(reader.pid, signal.SIGCONT)
            writer.write([b""], "step 3", timeout_s=PATIENCE_S)
            writer.close()
            assert reader.hear() == "end"
            (line,) = caplog.messages
            assert line.endswith(f"for step 3: step 2 is not read by rank 1 pid={reader.pid}")


def test_dead_writer_ends_the_readers_wait_after_its_last_message() -> None:
    """What a killed writer had published is read; then comes EOFError, not silence."""
    with contextlib.closing(Ring.create(num_chunks=4, chunk_bytes=128, num_readers=1)) as ring:
        with ring_processes.start("core", ring_processes.write_then_linger, ring, 2) as writer:
            reader = RingReader(ring, 0, writer.peer)
            assert writer.hear() == "written"
            os.kill(writer.pid, signal.SIGKILL)
            for sequence in range(2):
                assert [bytes(f) for f in reader.read(timeout_s=PATIENCE_S)] == [content(sequence)]
            began_s = time.monotonic()
            with pytest.raises(EOFError, match="core pid="):
                reader.read(timeout_s=PATIENCE_S)
            assert time.monotonic() - began_s < 2
