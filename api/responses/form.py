"""The answer to one request for a response: whole, as a stream, or in the background.

generation -> output deltas -> OutputWriter -> items and events -> Response
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from api.errors import Failure
from api.generate import Batch, Generation
from api.message_plan import MessageReader
from api.responses.events import EventLog, NoEvents
from api.responses.items import Item
from api.responses.output import OutputWriter
from api.responses.protocol import (
    Completed,
    Created,
    Error,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    Status,
    Usage,
)
from api.responses.store import StoredResponse

_LAST_EVENTS: dict[Status, type[Completed | Incomplete | Failed]] = {
    "completed": Completed,
    "incomplete": Incomplete,
    "failed": Failed,
    "cancelled": Incomplete,  # it has no event of its own
}

Keep = Callable[[StoredResponse], None]


class ResponseFormat:
    """Makes a response of what a generation brings: an `answer.Format`.

    Args:
        response: as it begins; it is kept up to date.
        conversation: what was said before.
        generation: one sequence.
        reader: tells thoughts, texts and calls apart; None: all is text.
        keep: takes the response when it has ended; None: nobody does.
        num_bytes: how many bytes a token adds to the text, by its id.
        has_events: somebody reads them.
        packs_thoughts: thoughts are there a second time, for clients that carry them so.
    """

    def __init__(
        self,
        response: Response,
        conversation: Sequence[Item],
        generation: Generation,
        reader: MessageReader | None,
        keep: Keep | None,
        num_bytes: Callable[[int], int],
        *,
        has_events: bool,
        packs_thoughts: bool = False,
    ) -> None:
        self.response = response
        self.log = EventLog() if has_events else None
        self.conversation = conversation
        self._generation = generation
        self._events = self.log or NoEvents()
        self._output = OutputWriter(reader, self._events, num_bytes, packs_thoughts=packs_thoughts)
        self._keep = keep
        self._finish_reason: str | None = None
        self._is_begun = False

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def is_over(self) -> bool:
        """Whether it has ended, however."""
        return self.response.status not in ("queued", "in_progress")

    def begin(self) -> None:
        """The first events. Called by the first `push`, or before it."""
        if self._is_begun:
            return
        self._is_begun = True
        self._events.add(Created(self.response))
        self._events.add(InProgress(self.response))

    def push(self, batch: Batch) -> None:
        """Take in what is new."""
        self.begin()
        for _, delta in batch:
            self._output.push(delta)
            self._finish_reason = delta.finish_reason

    def finish(self) -> None:
        """The generation has come to its end."""
        match self._finish_reason:
            case "length":
                self._output.finish("incomplete")
                self.response.incomplete_details = IncompleteDetails("max_output_tokens")
                self._end("incomplete")
            case "abort":
                self._fail("server_error", "the engine has ended this request")
            case _:
                self._output.finish("completed")
                self.response.completed_at = int(time.time())
                self._end("completed")

    def cancel(self) -> None:
        """Nobody wants more of it."""
        self._output.abandon()
        self._end("cancelled")

    def fail(self, failure: Failure) -> None:
        """Something has failed, or the engine has refused the request."""
        is_ours = failure.status >= 500
        self._fail("server_error" if is_ours else "invalid_prompt", failure.details.message)

    # ---------------------------------------------------------------------------- answer.Format

    def chunks(self, batch: Batch) -> bytes:
        self.push(batch)
        return self._take()

    def last_chunks(self) -> bytes:
        if self._finish_reason is None:
            return b""  # the client has gone
        self.finish()
        return self._take()

    def failed(self, failure: Failure) -> bytes:
        self.begin()
        self.fail(failure)
        return self._take()

    async def whole(self) -> Response:
        while not self._generation.is_over:
            self.push(await self._generation.news())
        self._generation.check_client()
        self.finish()
        return self.response

    def _take(self) -> bytes:
        return b"".join(self.log.take()) if self.log is not None else b""

    # --------------------------------------------------------------------------------------- end

    def _fail(self, code: str, message: str) -> None:
        self._output.abandon()
        self.response.error = Error(code, message)
        self._end("failed")

    def _end(self, status: Status) -> None:
        self.response.status = status
        self.response.output = self._output.items
        self.response.usage = self._usage()
        self._events.add(_LAST_EVENTS[status](self.response))
        if self._keep is not None:
            self._keep(self.stored())

    def stored(self, events: Sequence[bytes] = ()) -> StoredResponse:
        """The response as it has ended.

        Args:
            events: of its stream, for clients that come back to it.
        """
        assert self.is_over
        return StoredResponse(
            self.id,
            self.conversation,
            self._output.items,
            msgspec.json.encode(self.response),
            can_go_on=self.response.status in ("completed", "incomplete"),
            is_background=self.response.background,
            events=events,
        )

    def _usage(self) -> Usage:
        usage = self._generation.usage()
        return Usage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(self._output.num_reasoning_tokens),
            usage.total_tokens,
        )
