"""Runs code of several processes in every order that memory could see it, chosen by a seed.

Each task is a thread, but only the one that holds the baton runs, and at each access to the memory
the baton may go to another. So a seed is an interleaving, and a failing one can be replayed.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE_S = 60.0
MAX_ACCESSES = 100_000
"""Of all tasks together: after that they are taken to wait for each other for ever."""


class Baton:
    """Decides who runs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._turns: list[threading.Semaphore] = []
        self._alive: list[int] = []
        self._runner = 0
        self._turn_length = 0
        self._num_accesses = 0
        self._errors: list[BaseException] = []
        self._is_over = threading.Event()

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all tasks to their end; raise what the first that failed has raised."""
        self._turns = [threading.Semaphore(0) for _ in tasks]
        self._alive = list(range(len(tasks)))
        threads = [
            threading.Thread(target=self._play, args=(i, task), daemon=True)
            for i, task in enumerate(tasks)
        ]
        for thread in threads:
            thread.start()
        self._hand_on()
        assert self._is_over.wait(PATIENCE_S), "a task does something else than use the memory"
        if self._errors:
            raise self._errors[0]

    def switch(self) -> None:
        """Perhaps let another task run first. Turns of all lengths: a task may come between any two
        accesses of another, or get ahead of it by many."""
        self._num_accesses += 1
        assert self._num_accesses < MAX_ACCESSES, "the tasks wait for each other for ever"
        self._turn_length -= 1
        if self._turn_length > 0:
            return
        self._turn_length = self._random.choice((1, 2, 4, 8, 16, 32, 64, 128))
        runner = self._runner
        if (chosen := self._random.choice(self._alive)) != runner:
            self._runner = chosen
            self._turns[chosen].release()
            self._turns[runner].acquire()

    def _play(self, index: int, task: Callable[[], None]) -> None:
        self._turns[index].acquire()
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in `run`
            self._errors.append(error)
            self._alive.clear()  # the others stay where they are
        else:
            self._alive.remove(index)
        self._hand_on()

    def _hand_on(self) -> None:
        if not self._alive:
            self._is_over.set()
        else:
            self._runner = self._random.choice(self._alive)
            self._turns[self._runner].release()


class SharedBytes(bytearray):
    """Memory at whose every access another task may come first.

    Several bytes are read and written one by one, and written twice each: C copies memory in words
    that may overlap.
    """

    baton: Baton

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return bytes(self[index] for index in range(*key.indices(len(self))))
        self.baton.switch()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            places = range(*key.indices(len(self)))
            for _ in range(2):
                for index, byte in zip(places, bytes(value), strict=True):
                    self[index] = byte
        else:
            self.baton.switch()
            super().__setitem__(key, value)
