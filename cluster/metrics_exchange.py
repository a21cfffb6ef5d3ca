"""An API server's way to the metrics of the others on its port, by the channel to the command.

Implements `api.metrics.MetricsExchange`; the other end is `metrics_hub`. The command's words come
from the thread that listens to it, and are handled on the event loop, which has the metrics.
"""

import asyncio
import contextlib
from collections.abc import Callable

from api.metric_families import Family
from cluster.channel import Channel, Part, Scrape, Whole
from cluster.metrics_hub import PART_TIMEOUT_S
from engine.errors import UnavailableError

_TIMEOUT_S = 2 * PART_TIMEOUT_S + 1.0
"""A collection may be under way when we ask, and then comes ours."""


class MetricsExchange:
    """`on_part_wanted` and `on_whole` are for the listening thread, the others for the loop's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read: Callable[[], list[Family]] = list
        self._number = 0
        self._answer: asyncio.Future[list[Family]] | None = None
        self._one_at_a_time = asyncio.Lock()

    def attach(self, read: Callable[[], list[Family]]) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()

    async def collect(self) -> list[Family]:
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._one_at_a_time:
                self._number += 1
                self._answer = asyncio.get_running_loop().create_future()
                self._channel.send(Scrape(self._number))
                return await self._answer
        except TimeoutError as error:
            raise UnavailableError("the metrics were not collected in time") from error

    def close(self) -> None:
        """Leave our last values behind, once the loop has ended: the others count them in."""
        self._channel.send(Part(self._read()))

    # ------------------------------------------------------------------- what the command says

    def on_part_wanted(self) -> None:
        if self._loop is None:
            self._channel.send(Part([]))  # starting: nothing has been counted
        else:
            self._on_loop(lambda: self._channel.send(Part(self._read())))

    def on_whole(self, whole: Whole) -> None:
        if self._loop is not None:  # else the one before us here had asked
            self._on_loop(lambda: self._take(whole))

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has ended, and `close` tells the rest
            self._loop.call_soon_threadsafe(call)

    def _take(self, whole: Whole) -> None:
        answer = self._answer
        if whole.number == self._number and answer is not None and not answer.done():
            answer.set_result(whole.families)
