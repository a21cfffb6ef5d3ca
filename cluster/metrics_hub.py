"""Collects the metrics of all API servers when any of them is scraped. In the command's process.

    scraped API server  --Scrape-->   hub  --PartWanted-->  all of them
                        <--Whole---   hub  <--Part--------

One thread, one collection at a time; who asks during one shares the next, so that a scrape counts
all that had happened before it. An API server that does not answer in time counts with what it said
last: its part never shrinks. It is not asked again before it has answered, or what we say would
pile up and hold us.
"""

import threading
import time
from collections.abc import Sequence

from api.metric_families import Family
from api.metrics_merge import age_family, merge
from cluster.channel import Channel, PartWanted, Whole

PART_TIMEOUT_S = 1.0
"""How long a scrape waits for an API server. Prometheus itself waits for 10 s."""


class MetricsHub:
    """All methods but `start` are for any thread.

    Args:
        channels: to the API servers, by index.
        timeout_s: how long to wait for one of them.
    """

    def __init__(self, channels: Sequence[Channel], timeout_s: float = PART_TIMEOUT_S) -> None:
        self._channels = channels
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._scrapes: dict[int, int] = {}
        """By API server, what waits for the next collection."""
        self._parts: dict[int, list[Family]] = {}
        self._said_at: dict[int, float] = {}
        self._owing: set[int] = set()
        """API servers that have been asked and have not answered."""
        self._gone: set[int] = set()
        self._num_retired = 0
        """API servers whose last parts are kept under negative numbers."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="metrics-hub", daemon=True).start()

    def ask(self, index: int, number: int) -> None:
        """An API server has been scraped; `Whole` goes there. Its later scrape replaces an earlier
        one that still waits."""
        with self._changed:
            self._scrapes[index] = number
            self._changed.notify_all()

    def take(self, index: int, families: list[Family]) -> None:
        """What an API server has said."""
        with self._changed:
            self._parts[index] = families
            self._said_at[index] = time.monotonic()
            self._owing.discard(index)
            self._changed.notify_all()

    def drop(self, index: int) -> None:
        """An API server has gone. What it has counted stays; nobody waits for it."""
        with self._changed:
            self._gone.add(index)
            self._changed.notify_all()

    def replace(self, index: int) -> None:
        """Another API server has the index now. What the one before has counted stays; what was of
        its process only, goes."""
        with self._changed:
            part = self._parts.pop(index, [])
            lasting = [each for each in part if each.kind != "gauge" and each.rule != "each"]
            self._num_retired += 1
            self._parts[-self._num_retired] = lasting
            self._said_at.pop(index, None)
            self._owing.discard(index)
            self._gone.discard(index)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._scrapes)
                scrapes, self._scrapes = self._scrapes, {}
            whole = self._collect()
            for index, number in scrapes.items():
                self._channels[index].send(Whole(number, whole))

    def _collect(self) -> list[Family]:
        with self._changed:
            asked = [index for index in range(len(self._channels)) if index not in self._owing]
            self._owing.update(asked)
        for index in asked:
            self._channels[index].send(PartWanted())
        with self._changed:
            self._changed.wait_for(self._is_complete, self._timeout_s)
            now = time.monotonic()
            ages_s = {index: now - said_at for index, said_at in self._said_at.items()}
            return [*merge(self._parts), age_family(ages_s)]

    def _is_complete(self) -> bool:
        return self._owing <= self._gone
