"""Waits for the ends of actors, and tells of them: whose, and which was the first cause. Used by
`ray_engines`.

Ray's call of `run` ends with the actor. Who waits for it sleeps, and no other call is under way.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cluster.actors import End
from cluster.ray_actors import Actor, end_of
from cluster.ray_lease import RayLease
from engine import run_log
from engine.errors import EXIT_CONFIG
from engine.lifecycle import describe_exit

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""How long a core's message that says why it ends may take after its end."""

_LOOK_S = 1.0
"""How often a thread looks whether it waits for somebody who has been given up."""


class EndWatch:
    """The ends of one server's actors, each in a thread with those that started with it.

    Args:
        on_death, has_said_why, last_seen: see `engine_group.EngineGroup`.
        lease: once it is closed, ends are no news.
        are_deaths_apart: whether actors may be given up, so that nobody waits for them.
    """

    def __init__(
        self,
        on_death: Callable[[int | None, int, str], None],
        has_said_why: Callable[[int | None, int], bool],
        last_seen: Callable[[int], str],
        lease: RayLease,
        *,
        are_deaths_apart: bool = False,
    ) -> None:
        self._on_death = on_death
        self._has_said_why = has_said_why
        self._last_seen = last_seen
        self._lease = lease
        self._interval_s = _LOOK_S if are_deaths_apart else None
        self._threads: list[threading.Thread] = []
        self._telling = threading.Lock()
        """Of two that end at once the second hears of the first."""

    def watch(self, ray: Any, actors: Sequence[Actor]) -> None:
        """Wait for the ends of their calls of `run`. Returns at once."""
        thread = threading.Thread(
            target=self._wait, args=(ray, actors), name="ray-watch", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def join(self, timeout_s: float) -> None:
        """Wait until nothing more is asked of Ray: after all actors have ended."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _wait(self, ray: Any, actors: Sequence[Actor]) -> None:
        pending = {actor.run: actor for actor in actors}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=self._interval_s)
            for call in done:
                self._report(pending.pop(call), end_of(ray, call))
            pending = {call: actor for call, actor in pending.items() if not actor.is_lost}

    def _report(self, actor: Actor, end: End) -> None:
        actor.end = end
        run_log.record("exit", process=actor.title, pid=actor.pid, exit_code=end.exit_code)
        if self._lease.is_closed:
            return
        if end.exit_code == EXIT_CONFIG and end.cause is not None and not actor.epoch:
            self._on_death(actor.index, actor.epoch, end.cause)
            return
        line = f"{actor} {end.cause or describe_exit(end.exit_code)}{self._where(actor)}"
        # What ended without a word may not be the first: a node takes all its ranks with it.
        has_said_why = partial(self._has_said_why, actor.index, actor.epoch)
        if end.cause is None:
            self._await_last_words(has_said_why)
        with self._telling:
            if has_said_why():
                logger.info("%s; the first cause is logged above", line)
            else:
                logger.error("first cause: %s", line)
            self._on_death(actor.index, actor.epoch, line)

    def _where(self, actor: Actor) -> str:
        seen = "" if actor.index is None else self._last_seen(actor.index)
        return f"; last seen in {seen}" if seen else ""

    def _await_last_words(self, has_said_why: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LAST_WORDS_S
        while not has_said_why() and time.monotonic() < deadline:
            if self._lease.wait_closed(0.01):
                return
