"""Outputs of one request on their way from the socket to whoever reads them.

`engine_client` pushes, a handler takes. Outputs that wait are merged, so a reader that is slower
than the engine gets fewer and larger ones, and no queue builds up behind it.
"""

import asyncio
from collections.abc import Callable

import numpy as np

from api.load_balancer import ONLY_ROUTE, Route
from api.timeline import Timeline
from engine.errors import RaywireError
from engine.wire import EngineCoreOutput, Logprobs, OutputDetails

_MAX_WAITING = 64
"""Outputs that wait as they are. More are merged as they come: a reader that stands still costs its
tokens, four bytes each, and not an object for every step."""


class Wakeup:
    """Lets one task wait for any of several streams. Setting it when nobody waits is remembered."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return at once if set since the last wait, else when it is set."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


class RequestStream:
    """Outputs of one request, in order, up to the one with a finish reason.

    Take until there is nothing, then wait for the `Wakeup`, which several streams may share. Close
    the stream in any case: before its end that aborts the request.
    """

    __slots__ = (
        *("_close", "_error", "_waiting"),
        *("is_finished", "request_id", "route", "timeline", "wakeup"),
    )

    def __init__(
        self,
        request_id: str,
        close: Callable[[str], None],
        wakeup: Wakeup | None = None,
        timeline: Timeline | None = None,
        route: Route = ONLY_ROUTE,
    ) -> None:
        self.request_id = request_id
        self.route = route
        self.wakeup = wakeup or Wakeup()
        self.timeline = timeline or Timeline()
        self.is_finished = False
        """The last output has been taken, or the stream was closed."""
        self._close = close
        self._waiting: list[EngineCoreOutput] = []
        self._error: RaywireError | None = None

    # ------------------------------------------------------------------ the engine client's side

    def push(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Add an output of the step that ended at `timestamp` on the core's clock."""
        self.timeline.update(output, timestamp)
        self._waiting.append(output)
        if len(self._waiting) > _MAX_WAITING:
            self._waiting = [merge(self._waiting)]
        self.wakeup.set()

    def fail(self, error: RaywireError) -> None:
        """End the stream with an error, behind what is waiting already."""
        self._error = error
        self.wakeup.set()

    # ----------------------------------------------------------------------- the reader's side

    def take(self) -> EngineCoreOutput | None:
        """Return everything that waits as one output, or None if nothing does.

        Raises:
            RaywireError: what `fail` was given, once, behind what was waiting.
        """
        if not self._waiting:
            if self._error is not None and not self.is_finished:
                self.is_finished = True
                # One error object may end many streams; a traceback would grow on it.
                raise self._error.with_traceback(None)
            return None
        waiting, self._waiting = self._waiting, []
        if self._error is not None:
            self.wakeup.set()  # for the error, whose own call may have been answered with these
        output = waiting[0] if len(waiting) == 1 else merge(waiting)
        if output.finish_reason is not None:
            self.is_finished = True
        return output

    def close(self) -> None:
        """Stop reading. Aborts the request unless its last output has been taken. Idempotent."""
        if not self.is_finished:
            self.is_finished = True
            self._waiting = []
            self._close(self.request_id)


def merge(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Several outputs of one request as one: as if one long step had brought them all."""
    last = outputs[-1]
    return EngineCoreOutput(
        request_id=last.request_id,
        new_token_ids=b"".join(output.new_token_ids for output in outputs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        details=_merge_details([o.details for o in outputs if o.details is not None]),
    )


def _merge_details(details: list[OutputDetails]) -> OutputDetails | None:
    if len(details) < 2:
        return details[0] if details else None
    events = [event for d in details if d.events for event in d.events]
    return OutputDetails(
        new_logprobs=_join([d.new_logprobs for d in details if d.new_logprobs is not None]),
        prompt_logprobs=_join(
            [d.prompt_logprobs for d in details if d.prompt_logprobs is not None]
        ),
        pooling_output=next(
            (d.pooling_output for d in details if d.pooling_output is not None), None
        ),
        events=events or None,
        prefill_stats=next((d.prefill_stats for d in details if d.prefill_stats), None),
        error=next((d.error for d in details if d.error), None),
        error_code=next((d.error_code for d in details if d.error), None),
        error_param=next((d.error_param for d in details if d.error), None),
    )


def _join(parts: list[Logprobs]) -> Logprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )
