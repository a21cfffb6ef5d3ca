"""Bells and the wait for them."""

import contextlib
import os
import pickle
import threading
import time

import pytest

from workers.wakeup import Bell, Waiter


def test_ring_before_the_wait_is_not_lost() -> None:
    """However many rings, one wait ends at once; the next one waits again."""
    with contextlib.closing(Bell.create()) as bell:
        waiter = Waiter([bell])
        for _ in range(1000):
            bell.ring()
        began_s = time.monotonic()
        assert not waiter.wait(60)
        assert time.monotonic() - began_s < 10
        assert not waiter.wait(0.01)


def test_ring_ends_a_wait_under_way() -> None:
    """From another thread, as from another process."""
    with contextlib.closing(Bell.create()) as bell:
        threading.Timer(0.02, bell.ring).start()
        began_s = time.monotonic()
        Waiter([bell]).wait(60)
        assert time.monotonic() - began_s < 10


def test_end_of_a_process_is_told_apart_from_a_ring() -> None:
    """A sentinel that becomes readable is a death, now and at every wait after."""
    sentinel, write_end = os.pipe()
    with contextlib.closing(Bell.create()) as bell:
        waiter = Waiter([bell], [sentinel])
        bell.ring()
        assert not waiter.wait(60)
        os.close(write_end)
        assert waiter.wait(60)
        assert waiter.wait(60)
    os.close(sentinel)


def test_bells_are_handed_to_children_only() -> None:
    """Pickled anywhere but in a start-up argument, a descriptor would mean nothing."""
    with contextlib.closing(Bell.create()) as bell:
        with pytest.raises(RuntimeError, match="should only be shared"):
            pickle.dumps(bell)
