"""An event loop in a thread of its own: `LLM` speaks to its engine there, whatever its caller's
thread does, which may well have an event loop too (notebooks do)."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 5.0


class LoopThread:
    """Runs coroutines that any thread hands in, until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function there, soon. Does nothing once the thread has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel what still runs and end the thread."""
        with contextlib.suppress(TimeoutError):
            self.submit(_cancel_others()).result(_PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
