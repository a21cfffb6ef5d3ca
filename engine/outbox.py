"""What the API servers are to be told of their requests: tokens, ends, and events with their times.

Outputs wait here, by API server, until the core fetches them after each step. Events go out with
the step they happened in: with its token, or without one. Filled by `scheduler`; pure.
"""

from engine import stop
from engine.request import Request
from engine.wire import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventKind,
    FinishReason,
    Logprobs,
    OutputDetails,
    PrefillStats,
    join_logprobs,
)

Outputs = dict[int, list[EngineCoreOutput]]
"""By client index."""


class Outbox:
    """Outputs of one engine core."""

    def __init__(self) -> None:
        self._outputs: Outputs = {}
        self._with_news: dict[str, Request] = {}
        """Requests with events that go out with the next update, by id."""

    def put(
        self,
        request: Request,
        packed: bytes,
        reason: FinishReason | None = None,
        logprobs: Logprobs | None = None,
        is_first: bool = False,
        error: str | None = None,
    ) -> None:
        """Put out a token, or news without one (`packed` is empty)."""
        details = None
        if is_first or request.events or logprobs is not None or error is not None:
            details = _details(request, is_first, logprobs, error)
            request.events = []
        output = EngineCoreOutput(
            request.request_id,
            packed,
            reason,
            stop.stop_reason(request) if reason is FinishReason.STOP else None,
            details,
        )
        outputs = self._outputs.get(request.client_index)
        if outputs is None:
            outputs = self._outputs[request.client_index] = []
        outputs.append(output)

    def record(self, request: Request, kind: EventKind, now: float) -> None:
        """Something has happened to `request`, which is told with its next output."""
        request.events.append(EngineCoreEvent(kind, now))
        self._with_news[request.request_id] = request

    def put_news(self) -> None:
        """Events go out with the step they happened in, also where it brought no token."""
        for request in self._with_news.values():
            if request.events:
                self.put(request, b"")
        self._with_news.clear()

    def forget(self, request: Request) -> None:
        """It has ended: its last output is out."""
        self._with_news.pop(request.request_id, None)

    def take(self) -> Outputs:
        """All since the last call."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._outputs

    def validate(self, requests: dict[str, Request]) -> None:
        """Check that nothing is kept of requests that have ended. For tests."""
        assert self._with_news.keys() <= requests.keys()


def _details(
    request: Request, is_first: bool, logprobs: Logprobs | None, error: str | None
) -> OutputDetails:
    """What goes with an output beside its token; with the first token, all that is sent once."""
    prefill_stats = prompt_logprobs = None
    if is_first:
        prefill_stats = PrefillStats(request.num_prompt_tokens, request.num_cached_tokens)
        if request.prompt_logprobs:
            prompt_logprobs = join_logprobs(request.prompt_logprobs)
    return OutputDetails(
        new_logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        events=request.events or None,
        prefill_stats=prefill_stats,
        error=error,
    )
