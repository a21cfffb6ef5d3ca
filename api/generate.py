"""All sequences of one HTTP request, from prompts to deltas: `n` for each prompt, run together.

    prompts x n --> engine requests --> streams --> output processors --> (choice, delta) …

Used by `answer`, which turns deltas into HTTP. Choice k of prompt p has index p * n + k. However a
generation ends (finished, failed, cancelled because the client has gone), `close` leaves nothing
behind on the engine.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import ClientDisconnect

from api.answer_bodies import PromptTokensDetails, Usage
from api.load_balancer import Route
from api.metrics import RequestRecord
from api.output_processor import OutputDelta, OutputProcessor
from api.request_stream import RequestStream, Wakeup
from api.route_headers import RouteWish
from api.service import Service
from api.structured.fields import Wanted
from engine.errors import InvalidRequestError, RaywireError
from engine.structured_output import PARAM
from engine.wire import EngineCoreRequest

_SENT_AT_ONCE = 32
"""Sequences, of the thousand that a request may have: a millisecond or two."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine."""

    token_ids: list[int]
    requests: list[EngineCoreRequest]
    """One for each continuation."""

    text: str = ""
    """As it was rendered; of a completion only where the answer repeats it."""

    beginning: str = ""
    """What the answer to a conversation repeats of it."""

    is_thinking: bool = False
    """It ends inside a thought, where thoughts are told apart."""

    bound: Wanted | None = None
    """What the output must look like."""


class Choice:
    """One sequence."""

    __slots__ = ("_record", "_stream", "index", "processor")

    def __init__(
        self, index: int, processor: OutputProcessor, stream: RequestStream, record: RequestRecord
    ) -> None:
        self.index = index
        self.processor = processor
        self._stream = stream
        self._record = record

    def take(self) -> OutputDelta | None:
        """What has come since the last call, or None.

        Raises:
            EngineDeadError, RequestFailedError, UnavailableError: nothing more will come.
            RequestError: the engine has refused the request.
        """
        # Until there is a delta or nothing: an error may wait behind a mere change of state, and
        # nobody would be woken for it again.
        while (output := self._stream.take()) is not None:
            delta = self.processor.push(output)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self.end(delta.finish_reason)
            if delta.failure is not None:
                raise delta.failure
            return delta
        return None

    def end(self, reason: str) -> None:
        """Book the sequence, and abort it if it still runs. Only the first call has an effect."""
        self._stream.close()
        self._record.finish(
            reason,
            num_prompt_tokens=self.processor.num_prompt_tokens,
            num_output_tokens=self.processor.num_output_tokens,
        )


Batch = Sequence[tuple[Choice, OutputDelta]]
"""What is new, of some of the choices."""


class Generation:
    """The sequences of one request."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.wakeup = Wakeup()
        """Set when any of them has news."""
        self.routes: list[Route] = []
        """Where they went: one for each prompt."""
        self._running: list[Choice] = []
        self._failure: RaywireError | None = None
        """What has ended all of them, until it is raised."""
        self._is_cancelled = False
        self._n = 1
        self._bound: Wanted | None = None

    def add(self, choice: Choice) -> None:
        """One more sequence, which runs."""
        self.choices.append(choice)
        self._running.append(choice)

    async def launch(
        self,
        service: Service,
        prompts: Sequence[Prompt],
        processors: Iterable[OutputProcessor],
        arrived_at: float,
        wish: RouteWish,
    ) -> None:
        """Send all sequences to the engine; other requests get their turn in between. Those of one
        prompt go to one rank, which then computes it once.

        Args:
            service: with the engine client.
            prompts: of the request, each with as many continuations.
            processors: one for each continuation.
            arrived_at: `time.monotonic()`.
            wish: what the client said about ranks.

        Raises:
            ClientDisconnect: cancelled meanwhile.
            EngineDeadError: an engine core is gone.
        """
        self._n = len(prompts[0].requests)
        self._bound = prompts[0].bound
        requests = [request for prompt in prompts for request in prompt.requests]
        for index, (request, processor) in enumerate(zip(requests, processors, strict=True)):
            if index and index % _SENT_AT_ONCE == 0:
                await asyncio.sleep(0)
            self.check_client()
            record = service.metrics.record(arrived_at)
            if wish.pinned_rank is not None:
                request = msgspec.structs.replace(request, data_parallel_rank=wish.pinned_rank)
            is_first = index % self._n == 0
            stream = service.client.stream(
                request,
                wakeup=self.wakeup,
                timeline=record,
                session=wish.session,
                follows=None if is_first else self.routes[-1],
            )
            if is_first:
                self.routes.append(stream.route)
                record.wait_for_prefill(len(prompts[index // self._n].token_ids))
            service.metrics.on_route(stream.route)
            self.add(Choice(index, processor, stream, record))

    @property
    def num_choices(self) -> int:
        """How many are shown: their indices are smaller."""
        return len(self.choices)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come: no news, and no error."""
        return self._is_cancelled or not (self._running or self._failure)

    async def news(self) -> Batch:
        """What is new, of some of the choices, as soon as anything is; nothing if the client goes.

        Raises:
            EngineDeadError, RequestFailedError, UnavailableError: nothing more will come. What came
                before it, of any choice, has been returned.
        """
        while not self._is_cancelled:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            await self.wakeup.wait()
            if batch := self._take():
                return batch
        return ()

    def _take(self) -> Batch:
        """All that is new. Keeps the first error, which ends all choices."""
        batch: list[tuple[Choice, OutputDelta]] = []
        has_ended = False
        for choice in self._running:
            try:
                delta = choice.take()
            except RaywireError as error:
                self._failure = self._failure or self._blamed(error)
            else:
                if delta is not None:
                    batch.append((choice, delta))
                    has_ended |= delta.finish_reason is not None
        if self._failure is not None:
            self.close("error")
            self._running = []
        elif has_ended:
            self._running = [each for each in self._running if not each.processor.is_finished]
        return batch

    def _blamed(self, error: RaywireError) -> RaywireError:
        """The same error with the client's field: the engine knows a description of the output, not
        what it was made of."""
        if not isinstance(error, InvalidRequestError) or error.param != PARAM or not self._bound:
            return error
        blamed = InvalidRequestError(error.message, self._bound.field)
        blamed.code = error.code
        return blamed

    def cancel(self) -> None:
        """The client has gone: abort, and end `news`."""
        self._is_cancelled = True
        self.close()
        self.wakeup.set()

    def check_client(self) -> None:
        """Raise ClientDisconnect if the client has gone."""
        if self._is_cancelled:
            raise ClientDisconnect

    def close(self, reason: str = "abort") -> None:
        """Abort whatever still runs. Idempotent."""
        for choice in self.choices:
            choice.end(reason)

    def usage(self, *, counts_output: bool = True) -> Usage:
        """Tokens so far: each prompt once, all outputs together."""
        firsts = [choice.processor for choice in self.choices[:: self._n]]
        prompt_tokens = sum(first.num_prompt_tokens for first in firsts)
        completion_tokens = sum(choice.processor.num_output_tokens for choice in self.choices)
        completion_tokens *= counts_output
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(sum(first.num_cached_tokens for first in firsts)),
        )
