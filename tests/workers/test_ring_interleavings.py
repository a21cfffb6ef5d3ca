"""The ring's two columns in any order that memory could see them: no message lost, doubled or torn.

Sequentially consistent memory only: that the CPU keeps the order of the columns is what the ring's
head argues, for x86-64 by its rules and for others by the fences.
"""

import contextlib
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.interleaving import Baton, SharedBytes
from workers.ring import Layout, Peer, Ring, RingReader, RingWriter
from workers.shared_memory import SharedMemory
from workers.wakeup import Bell

NUM_MESSAGES = 5


@dataclass
class FakeMemory:
    bytes: SharedBytes


@given(seed=st.integers(0, 2**32), num_chunks=st.integers(1, 3), num_readers=st.integers(1, 3))
@settings(max_examples=150)
def test_no_interleaving_loses_doubles_or_tears_a_message(
    seed: int, num_chunks: int, num_readers: int
) -> None:
    """Each reader gets each message whole, once, in order, whoever comes between which bytes."""
    layout = Layout(num_chunks, chunk_bytes=48, num_readers=num_readers)
    memory = FakeMemory(SharedBytes(layout.num_bytes))
    memory.bytes.baton = baton = Baton(seed)
    bells = [Bell.create() for _ in range(1 + num_readers)]
    with contextlib.ExitStack() as stack:
        for bell in bells:
            stack.callback(bell.close)
        ring = Ring(layout, cast(SharedMemory, memory), bells[0], bells[1:])
        received: list[list[bytes]] = [[] for _ in range(num_readers)]

        def write() -> None:
            writer = RingWriter(ring, [Peer("reader")] * num_readers)
            for i in range(NUM_MESSAGES):
                while not writer.try_write([b"%d" % i * 8]):
                    pass

        def read(index: int) -> None:
            reader = RingReader(ring, index, Peer("writer"))
            while len(received[index]) < NUM_MESSAGES:
                if frames := reader.try_read():
                    received[index].append(bytes(frames[0]))

        baton.run([write, *(lambda index=i: read(index) for i in range(num_readers))])
    assert received == [[b"%d" % i * 8 for i in range(NUM_MESSAGES)]] * num_readers


class FakeBell:
    """Counts rings that nobody has heard yet."""

    def __init__(self) -> None:
        self.num_rings = 0

    def ring(self) -> None:
        self.num_rings += 1


@dataclass
class FakeWaiter:
    """Sleeps until its bell has rung. If it never does, the baton notices."""

    bell: FakeBell
    baton: Baton

    def wait(self, timeout_s: float) -> bool:
        while not self.bell.num_rings:
            self.baton.switch()
        self.bell.num_rings = 0
        return False


@given(seed=st.integers(0, 2**32), num_chunks=st.integers(1, 2), num_readers=st.integers(1, 3))
@settings(max_examples=150)
def test_no_interleaving_loses_the_wake_up_of_a_writer(
    seed: int, num_chunks: int, num_readers: int
) -> None:
    """The writer parks without a deadline, and is rung only while it says that it waits: whoever
    comes between saying, looking and parking, it wakes when there is room."""
    layout = Layout(num_chunks, chunk_bytes=48, num_readers=num_readers)
    memory = FakeMemory(SharedBytes(layout.num_bytes))
    memory.bytes.baton = baton = Baton(seed)
    bell = FakeBell()
    ring = Ring(
        layout,
        cast(SharedMemory, memory),
        cast(Bell, bell),
        [cast(Bell, FakeBell()) for _ in range(num_readers)],
    )
    received = [0] * num_readers

    def write() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("workers.ring.Waiter", lambda bells, sentinels: FakeWaiter(bell, baton))
            writer = RingWriter(ring, [Peer("reader")] * num_readers)
        for i in range(NUM_MESSAGES):
            writer.write([b"%d" % i * 8], "", timeout_s=1e9)

    def read(index: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("workers.ring.Waiter", lambda bells, sentinels: None)
            reader = RingReader(ring, index, Peer("writer"))
        while received[index] < NUM_MESSAGES:
            received[index] += reader.try_read() is not None

    baton.run([write, *(lambda index=i: read(index) for i in range(num_readers))])
    assert received == [NUM_MESSAGES] * num_readers
