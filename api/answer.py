"""From a checked request to its HTTP response: tokenize, generate, answer whole or as a stream.

The generating routes differ in what they ask for and in their JSON; each hands that in as a `Job`
with a `Format`, and leaves the rest to `respond`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from api import client_watch, route_headers, thinking_budget
from api.client_watch import ClientWatch
from api.errors import Failure
from api.generate import Batch, Generation, Prompt
from api.output_processor import OutputDelta, OutputProcessor, PositionLogprobs
from api.protocol import ChatBody, CompletionBody, GenerationBody
from api.route_headers import RouteWish
from api.sampling import SamplingParams
from api.service import LoadedModel, Service
from api.sse import EventStream
from engine.errors import InvalidRequestError

QUICK_S = 0.001
"""What takes no longer is done on the event loop: a thread would take longer to wake up."""

QUICK_BYTES = 2048
"""So much text is tokenized in that time,"""

_QUICK_SEQUENCES = 16
"""or so many sequences are made."""


@dataclass(slots=True)
class Part:
    """What one choice has that has not been shown yet; in a whole answer, all of it."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: OutputDelta) -> None:
        if delta.text:
            self.text.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Format(Protocol):
    """One route's JSON for one request."""

    def chunks(self, batch: Batch) -> bytes:
        """The events for what is new; empty where nothing can be shown yet."""

    def last_chunks(self) -> bytes:
        """The events after the last choice has ended: the usage, if asked for, and the mark of a
        stream that is whole."""

    def failed(self, failure: Failure) -> bytes:
        """The events that end a stream in which something has failed."""

    async def whole(self) -> msgspec.Struct:
        """The answer that is not streamed, once there is all of it.

        Raises:
            ClientDisconnect: nobody waits for it any more.
            ServerError: something has failed.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """A request that has passed all checks that need no tokens."""

    is_streamed: bool
    params: SamplingParams
    prepare: Callable[[LoadedModel], list[Prompt]]
    """Renders and tokenizes. Runs in a thread if it may take long."""

    make_format: Callable[[Generation, list[Prompt]], Format]
    headers: dict[str, str]
    arrived_at: float
    """`time.monotonic()`."""

    num_bytes: int
    """Length of the request's body."""

    num_sequences: int
    render_s: float = 0.0
    """What rendering takes at least."""

    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that show in the text of the answer."""

    make_generation: Callable[[], Generation] = Generation
    """How the sequences become choices."""

    session: str | None = None
    """Comes before the header of that meaning."""

    @property
    def is_quick(self) -> bool:
        """Whether `prepare` takes about `QUICK_S` at most."""
        share = self.num_bytes / QUICK_BYTES + self.num_sequences / _QUICK_SEQUENCES
        return share + self.render_s / QUICK_S <= 1.0


async def respond(service: Service, request: Request, job: Job) -> Response:
    """Generate, and return the response. Until its first byte, errors are plain HTTP errors.

    Raises:
        RequestError, ServerError: nothing has been sent.
        ClientDisconnect: nobody is left to answer; nothing runs any more.
    """
    wish = route_wish(service, request, job)
    generation = job.make_generation()
    watch = client_watch.of(request)

    def clean_up() -> None:
        watch.stop()
        generation.close()

    is_over = True
    try:
        form, headers = await start(service, job, generation, watch, wish)
        if not job.is_streamed:
            return json_response(await form.whole(), headers)
        events = _Events(form, generation, await generation.news())
        generation.check_client()
        is_over = False  # the response cleans up, when its last byte is out
        return EventStream(events, clean_up, headers)
    finally:
        if is_over:
            clean_up()


def route_wish(service: Service, request: Request, job: Job) -> RouteWish:
    """What the client says about ranks, in headers and body."""
    wish = route_headers.read(request.headers.raw, service.ranks)
    return wish if job.session is None else wish.with_session(job.session)


async def start(
    service: Service, job: Job, generation: Generation, watch: ClientWatch, wish: RouteWish
) -> tuple[Format, dict[str, str]]:
    """Prepare a job and send its sequences to the engine, unless the client goes away.

    Args:
        service: with the engine client.
        job: what is to run.
        generation: new; whoever calls closes it.
        watch: over the client; left running, so that `generation` ends with it.
        wish: what the client said about ranks.

    Returns:
        What turns the generation into the answer, and the headers of its response.
    """
    with service.admission.place(job.num_sequences):
        prompts, processors = await _prepared(service, job, generation, watch)
        watch.start(generation.cancel)
        await generation.launch(service, prompts, processors, job.arrived_at, wish)
    headers = {**job.headers, **route_headers.write(generation.routes, service.ranks)}
    return job.make_format(generation, prompts), headers


async def _prepared(
    service: Service, job: Job, generation: Generation, watch: ClientWatch
) -> tuple[list[Prompt], list[OutputProcessor]]:
    """What `_prepare` makes. Raises ClientDisconnect if nobody waits for it any more."""
    prepare = partial(_prepare, job, service.model)
    if job.is_quick:
        return prepare()
    preparing = service.threads.run(prepare, job.num_bytes)

    def on_gone() -> None:
        generation.cancel()
        preparing.cancel()

    watch.start(on_gone)
    try:
        return await preparing
    except asyncio.CancelledError:
        generation.check_client()
        raise


def _prepare(job: Job, model: LoadedModel) -> tuple[list[Prompt], list[OutputProcessor]]:
    """All that the loop need not do itself."""
    prompts = job.prepare(model)
    processors = [
        OutputProcessor(model.tokenizer, params, prompt.token_ids, job.kept_token_ids)
        for prompt in prompts
        for params in [_bound(job.params, prompt)] * len(prompt.requests)
    ]
    return prompts, processors


def _bound(params: SamplingParams, prompt: Prompt) -> SamplingParams:
    """The parameters of a prompt's sequences: a text that is whole ends them without a token."""
    return params if prompt.bound is None else params.bound_by(prompt.bound.output)


def check_size(num_prompts: int, n: int, service: Service) -> None:
    """Bound the sequences of one request: prompts times continuations."""
    most = service.config.max_sequences
    if num_prompts * n > most:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences; {most} are the"
            " most in one request",
            "n",
        )


def check_priority(priority: int | None, service: Service) -> None:
    """A priority that would be ignored is refused."""
    if priority and service.config.scheduling_policy != "priority":
        raise InvalidRequestError(
            "priority needs a server started with --scheduling-policy priority", "priority"
        )


def sampling_params(body: ChatBody | CompletionBody, service: Service) -> SamplingParams:
    """How to sample, with the budget of thoughts. Raises RequestError."""
    model = service.model
    budget = thinking_budget.make(body.thinking_token_budget, model.markup, model.tokenizer)
    params = body.generation_params(model.sampling_defaults)
    return params if budget is None else replace(params, thinking_budget=budget)


def has_ids_for_tokens(body: GenerationBody, service: Service) -> bool:
    """Whether log probabilities write a token as its id."""
    if body.return_tokens_as_token_ids is None:
        return service.config.return_tokens_as_token_ids
    return body.return_tokens_as_token_ids


def now() -> int:
    """`created` of an answer."""
    return int(time.time())


async def collect(generation: Generation) -> list[Part]:
    """All of a generation; one part for each choice.

    Raises:
        ClientDisconnect: nobody waits for it any more.
        ServerError: something has failed.
    """
    parts = [Part() for _ in range(generation.num_choices)]
    while not generation.is_over:
        for choice, delta in await generation.news():
            parts[choice.index].add(delta)
    generation.check_client()
    return parts


def json_response(body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), 200, headers, "application/json")


class _Events:
    """The events of a streamed answer: a `sse.EventSource`."""

    def __init__(self, form: Format, generation: Generation, first: Batch) -> None:
        self._form = form
        self._generation = generation
        self._first = first
        """What was waited for before anything was sent."""

    @property
    def is_over(self) -> bool:
        return self._generation.is_over and not self._first

    def failed(self, failure: Failure) -> bytes:
        return self._form.failed(failure)

    async def next(self) -> bytes:
        batch, self._first = self._first or await self._generation.news(), ()
        events = self._form.chunks(batch)
        return events + self._form.last_chunks() if self.is_over else events
