"""What the coordinator tells an API server: the work of every rank, also of those that it has sent
nothing itself. Pure: frames and times in, loads out.

A report is the whole state, so a lost one does no harm, and only silence does: then ranks are
chosen by what their own outputs say. Used by `engine_client`, which has the socket and knows the
epochs.
"""

import logging
from collections.abc import Callable, Sequence

from engine.codec import Decoder
from engine.errors import WireError
from engine.wire import CoordinatorType, EngineLoad, LoadReport

logger = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Five reports that did not come: a coordinator that hangs, or a broken link."""


class LoadFeed:
    """Times are of any one clock that does not jump.

    Args:
        take_load: takes in the load of one rank. Raises WireError for a rank that does not exist.
    """

    def __init__(self, take_load: Callable[[EngineLoad], None]) -> None:
        self.report: LoadReport | None = None
        """The latest."""
        self._take_load = take_load
        self._decode = Decoder[LoadReport](LoadReport).decode
        self._last_heard: float | None = None
        self._is_silent = False

    def take(self, frames: Sequence[bytes], now: float) -> None:
        """Take in one message.

        Raises:
            WireError: it breaks the protocol.
        """
        kind, *body = frames
        if kind != CoordinatorType.LOADS.value:
            raise WireError(f"unknown message type {kind[:8]!r} from the coordinator")
        self.report = self._decode(body)
        if self._is_silent:
            logger.info("the coordinator reports again")
        self._last_heard, self._is_silent = now, False
        for load in self.report.loads:
            self._take_load(load)

    def has_heard_of(self, engine_index: int, epoch: int) -> bool:
        """Whether the coordinator and that incarnation of a rank are connected, and we with it."""
        loads = [] if self.report is None else self.report.loads
        return any((load.engine_index, load.epoch) == (engine_index, epoch) for load in loads)

    def check_silence(self, now: float) -> None:
        """Log silence, once each time. Call it every now and then, from the start on."""
        if self._last_heard is None:
            self._last_heard = now
        silence_s = now - self._last_heard
        if silence_s > SILENCE_S and not self._is_silent:
            self._is_silent = True
            logger.warning(
                "no report from the coordinator for %.1f s; ranks are chosen without knowing what"
                " other API servers have sent them",
                silence_s,
            )

    def give_new_chance(self, now: float) -> None:
        """This process was stopped or starved itself: its silence does not count so far."""
        self._last_heard = now
