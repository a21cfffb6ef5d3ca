"""Threads for slow work on text: tokenizing, rendering, loading. The event loop only waits.

Long texts have a lane of their own, so that a few of them never hold up the many short ones. The
threads are daemons, unlike those of `concurrent.futures`: a text that takes half a minute must not
keep a process alive that was told to stop.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

LONG_BYTES = 1 << 16
"""A text from here on takes tens of milliseconds."""


class TextThreads:
    """Two lanes of threads, and everybody who waits for them.

    Args:
        num_threads: for short texts; long ones have one more.
    """

    def __init__(self, num_threads: int) -> None:
        self._short = _Lane("text-short", num_threads)
        self._long = _Lane("text-long", 1)
        self._waiting: set[asyncio.Future[Any]] = set()

    def run(self, call: Callable[[], T], num_bytes: int = 0) -> "asyncio.Future[T]":
        """Await it for what `call` returns or raises. Cancelling it takes back a call that no
        thread has begun. `num_bytes`: length of its text."""
        lane = self._short if num_bytes < LONG_BYTES else self._long
        work = lane.submit(call)
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)

        def forget(_: "asyncio.Future[T]") -> None:
            self._waiting.discard(waiter)
            work.cancel()  # no effect on what has begun

        waiter.add_done_callback(forget)
        asyncio.wrap_future(work).add_done_callback(lambda done: _hand_over(done, waiter))
        return waiter

    def cut(self, error: Exception) -> None:
        """Nobody waits any longer: they get `error`, whatever the threads are still busy with."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)

    def close(self) -> None:
        """Let the threads end when they are done."""
        self._short.close()
        self._long.close()


def _hand_over(done: "asyncio.Future[T]", waiter: "asyncio.Future[T]") -> None:
    if done.cancelled():
        return
    error = done.exception()  # read in any case, or asyncio warns of one that nobody has read
    if waiter.done():
        return
    if error is None:
        waiter.set_result(done.result())
    else:
        waiter.set_exception(error)


class _Lane:
    """Threads that take calls from one queue. They start with the first call."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._name = name
        self._num_threads = num_threads
        self._num_started = 0

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        if self._num_started < self._num_threads:
            self._num_started += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        result: Future[T] = Future()
        self._calls.put((call, result))
        return result

    def close(self) -> None:
        for _ in range(self._num_started):
            self._calls.put(None)

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, result = entry
            if not result.set_running_or_notify_cancel():
                continue
            try:
                value = call()
            except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
                result.set_exception(error)
            else:
                result.set_result(value)
