"""Slow work on text, off the event loop."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from api.threads import LONG_BYTES, TextThreads
from engine.errors import InvalidRequestError, UnavailableError

TIMEOUT_S = 20.0


@pytest.fixture
def threads() -> Iterator[TextThreads]:
    threads = TextThreads(2)
    yield threads
    threads.close()


def test_results_and_errors_come_back(threads: TextThreads) -> None:
    """From another thread than the event loop's."""

    def refuse() -> None:
        raise InvalidRequestError("no")

    async def work() -> str:
        with pytest.raises(InvalidRequestError):
            await threads.run(refuse)
        return await threads.run(lambda: threading.current_thread().name)

    assert asyncio.run(work()) == "text-short"


def test_long_texts_do_not_hold_up_short_ones(threads: TextThreads) -> None:
    """However many of them wait."""
    may_end = threading.Event()

    async def work() -> int:
        long_ones = [threads.run(lambda: may_end.wait(TIMEOUT_S), LONG_BYTES) for _ in range(5)]
        short = await asyncio.wait_for(threads.run(lambda: 7), TIMEOUT_S)
        may_end.set()
        await asyncio.gather(*long_ones)
        return short

    assert asyncio.run(work()) == 7


def test_cut_frees_who_waits(threads: TextThreads) -> None:
    """Whatever the threads are still busy with."""
    may_end = threading.Event()

    async def work() -> None:
        waiting = threads.run(lambda: may_end.wait(TIMEOUT_S))
        threads.cut(UnavailableError("the server is shutting down"))
        with pytest.raises(UnavailableError):
            await waiting
        may_end.set()
        assert await threads.run(lambda: 1) == 1  # and the thread goes on

    asyncio.run(work())


def test_call_that_nobody_waits_for_is_not_begun() -> None:
    """Cancelled or cut while it was in the queue: the next one gets its turn at once."""
    threads = TextThreads(1)
    may_end = threading.Event()
    begun: list[str] = []

    async def work() -> None:
        busy = threads.run(lambda: may_end.wait(TIMEOUT_S))
        threads.run(lambda: begun.append("cancelled")).cancel()
        cut = threads.run(lambda: begun.append("cut"))
        threads.cut(UnavailableError("the server is shutting down"))
        await asyncio.gather(busy, cut, return_exceptions=True)
        may_end.set()
        await threads.run(lambda: begun.append("next"))

    asyncio.run(work())
    threads.close()

    assert begun == ["next"]


def test_busy_thread_does_not_keep_the_process_alive() -> None:
    """A process that is told to stop does not wait for half a minute of tokenizing."""
    code = (
        "import asyncio, time; from api.threads import TextThreads; t = TextThreads(1)\n"
        "async def work():\n"
        "    t.run(lambda: time.sleep(60))\n"
        "asyncio.run(work())"
    )

    subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=True)
