"""POST /v1/completions."""

import time

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from api import answer, body, errors, ids, openapi_fields, prompts, sse, thinking_budget
from api.answer_bodies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
)
from api.choosing import check_beams, generation_for
from api.fields import KNOWN_IN_COMPLETIONS, NESTED, UNSUPPORTED_IN_COMPLETIONS
from api.generate import Batch, Generation, Prompt
from api.input_processor import DEFAULT_COMPLETION_TOKENS
from api.logprobs import CompletionLogprobsWriter, for_prompt
from api.output_processor import OutputDelta
from api.protocol import CompletionBody
from api.routing import Route
from api.sampling import SamplingParams
from api.service import LoadedModel, Service
from api.structured.fields import Wanted

_DECODER = msgspec.json.Decoder(CompletionBody)


def routes(service: Service) -> list[Route]:
    async def create_completion(request: Request) -> Response:
        return await answer.respond(service, request, await read_job(service, request))

    return [
        Route(
            ("POST",),
            "/v1/completions",
            create_completion,
            is_hot=True,
            generates=True,
            summary="How a text goes on",
            body=CompletionBody,
            raw_fields=openapi_fields.completion(service.config.max_n),
            example=openapi_fields.COMPLETION_EXAMPLE,
            answer=Completion,
            event=Completion,
        )
    ]


async def read_job(service: Service, request: Request) -> answer.Job:
    """What a request asks for: everything that can be wrong without looking at tokens."""
    raw = await service.bodies.read(request)
    arrived_at = time.monotonic()
    completion, ignored = body.decode(
        raw, _DECODER, KNOWN_IN_COMPLETIONS, UNSUPPORTED_IN_COMPLETIONS, NESTED
    )
    return _job(service, completion, len(raw), arrived_at, body.ignored_header(ignored))


def _job(
    service: Service,
    completion: CompletionBody,
    num_bytes: int,
    arrived_at: float,
    headers: dict[str, str],
) -> answer.Job:
    service.check_model_name(completion.model)
    completion.check(service.config.max_n)
    answer.check_priority(completion.priority, service)
    is_cut = completion.truncate_prompt_tokens is not None
    given = prompts.read(completion.prompt, service.model.inputs, may_be_long=is_cut)
    num_sequences = len(given) * completion.num_sequences
    answer.check_size(len(given), completion.num_sequences, service)
    check_beams(completion, len(given))
    params = answer.sampling_params(completion, service)
    answer_id = ids.answer_id("cmpl-", completion.request_id)

    def prepare(model: LoadedModel) -> list[Prompt]:
        wanted = completion.read_wanted()
        bound = params if wanted is None else params.bound_by(wanted.output)
        return [_prepare(model, completion, bound, prompt, answer_id, wanted) for prompt in given]

    def make_format(generation: Generation, prompts_: list[Prompt]) -> answer.Format:
        name = completion.model or service.config.served_model_names[0]
        form = _CompletionFormat(answer_id, name, completion, generation, prompts_)
        if completion.logprobs is not None:
            tokenizer = service.model.tokenizer
            has_token_ids = answer.has_ids_for_tokens(completion, service)
            form.writers = [
                CompletionLogprobsWriter(
                    tokenizer, params, form.prompt(index), has_token_ids=has_token_ids
                )
                for index in range(generation.num_choices)
            ]
        return form

    return answer.Job(
        bool(completion.stream),
        params,
        prepare,
        make_format,
        headers,
        arrived_at,
        num_bytes,
        num_sequences,
        make_generation=generation_for(completion, params),
        session=completion.session_id,
    )


def _prepare(
    model: LoadedModel,
    completion: CompletionBody,
    params: SamplingParams,
    prompt: str | list[int],
    answer_id: str,
    wanted: Wanted | None,
) -> Prompt:
    if isinstance(prompt, str):
        token_ids = model.inputs.encode(
            prompt,
            add_special_tokens=completion.add_special_tokens is not False,
            split_special_tokens=bool(completion.split_special_tokens),
            truncation=completion.truncation,
            num_output_tokens=completion.max_tokens,
        )
    else:
        token_ids = model.inputs.truncate(prompt, completion.truncation, completion.max_tokens)
    requests = model.inputs.make_requests(
        token_ids,
        thinking_budget.for_prompt(params, token_ids),
        request_id=answer_id,
        default_max_tokens=model.sampling_defaults.cap(DEFAULT_COMPLETION_TOKENS),
        priority=completion.priority or 0,
        cache_salt=completion.cache_salt,
    )
    if not completion.echo:
        return Prompt(token_ids, requests, bound=wanted)
    if isinstance(prompt, str) and completion.truncation is None:
        return Prompt(token_ids, requests, prompt, bound=wanted)
    return Prompt(token_ids, requests, model.tokenizer.decode(token_ids), bound=wanted)


class _CompletionFormat:
    """The answer to one completion request, whole or in chunks."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        completion: CompletionBody,
        generation: Generation,
        prompts_: list[Prompt],
    ) -> None:
        self._id = answer_id
        self._model = model
        self._created = answer.now()
        self._completion = completion
        self._generation = generation
        self._prompts = prompts_
        num_choices = generation.num_choices
        self._waiting = [answer.Part() for _ in range(num_choices)]
        self.writers: list[CompletionLogprobsWriter] = []
        """One for each choice, if log probabilities are asked for."""
        self._is_begun = [False] * num_choices
        is_plain = not (
            completion.echo
            or completion.return_token_ids
            or completion.logprobs is not None
            or completion.has_running_usage
        )
        self._text_events = sse.TextEvents(self._text_chunk) if is_plain else None
        """Of chunks that have nothing but text, where only the last has more."""

    def chunks(self, batch: Batch) -> bytes:
        events = []
        for choice, delta in batch:
            if self._text_events is not None and delta.finish_reason is None:
                if delta.text:
                    events.append(self._text_events.event(choice.index, delta.text))
                continue
            part = self._waiting[choice.index]
            part.add(self._shown(delta))
            if self._can_be_shown(choice.index, part):
                self._waiting[choice.index] = answer.Part()
                events.append(self._chunk([self._choice(choice.index, part, is_chunk=True)]))
        return b"".join(events)

    def last_chunks(self) -> bytes:
        if not self._completion.has_usage_chunk:
            return sse.DONE
        return self._chunk([], has_usage=True) + sse.DONE

    def failed(self, failure: errors.Failure) -> bytes:
        return sse.failed(failure)

    async def whole(self) -> Completion:
        parts = await answer.collect(self._generation)
        if self._completion.is_prompt_only:
            for part in parts:
                part.text, part.token_ids, part.logprobs = [], [], []
                part.finish_reason, part.stop_reason = "length", None
        choices = [self._choice(index, part, is_chunk=False) for index, part in enumerate(parts)]
        return Completion(self._id, self._created, self._model, choices, self._usage())

    def prompt(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self._prompts[index // (len(self._waiting) // len(self._prompts))]

    def _shown(self, delta: OutputDelta) -> OutputDelta:
        """What the client asked for of a delta: nothing new with `max_tokens` 0."""
        if not self._completion.is_prompt_only:
            return delta
        ended = "length" if delta.finish_reason is not None else None
        return msgspec.structs.replace(
            delta, text="", token_ids=[], logprobs=None, finish_reason=ended, stop_reason=None
        )

    def _text_chunk(self, index: int, text: str) -> Completion:
        return self._chunk_body([CompletionChoice(index, text, None, None)])

    def _can_be_shown(self, index: int, part: answer.Part) -> bool:
        """No chunk without text, but for the last one, and where token ids were asked for."""
        has_echo = bool(self._completion.echo) and not self._is_begun[index]
        has_tokens = bool(self._completion.return_token_ids and part.token_ids)
        return bool(part.text) or part.finish_reason is not None or has_echo or has_tokens

    def _choice(self, index: int, part: answer.Part, *, is_chunk: bool) -> CompletionChoice:
        prompt = self.prompt(index)
        is_first, self._is_begun[index] = not self._is_begun[index], True
        text = "".join(part.text)
        has_ids = bool(self._completion.return_token_ids)
        return CompletionChoice(
            index=index,
            text=prompt.text + text if is_first else text,
            logprobs=self._logprobs(index, part, is_first=is_first),
            finish_reason=part.finish_reason,
            stop_reason=(
                part.stop_reason if part.finish_reason is not None or not is_chunk else UNSET
            ),
            token_ids=part.token_ids if has_ids else UNSET,
            prompt_token_ids=prompt.token_ids if has_ids and is_first else UNSET,
            prompt_logprobs=self._prompt_logprobs(part),
        )

    def _logprobs(
        self, index: int, part: answer.Part, *, is_first: bool
    ) -> CompletionLogprobs | None:
        if self._completion.logprobs is None:
            return None
        writer, shape = self.writers[index], CompletionLogprobs([], [], [], [])
        if self._completion.echo and is_first:
            writer.add_prompt(shape, part.prompt_logprobs or [])
        writer.add(shape, part.logprobs)
        return shape

    def _prompt_logprobs(self, part: answer.Part) -> PromptLogprobs | UnsetType:
        if self._completion.prompt_logprobs is None:
            return UNSET
        return for_prompt(part.prompt_logprobs or [])

    def _chunk(self, choices: list[CompletionChoice], has_usage: bool = False) -> bytes:
        return sse.event(self._chunk_body(choices, has_usage))

    def _chunk_body(self, choices: list[CompletionChoice], has_usage: bool = False) -> Completion:
        chunk = Completion(self._id, self._created, self._model, choices)
        if has_usage or self._completion.has_running_usage:
            chunk.usage = self._usage()
        elif self._completion.has_usage_chunk:
            chunk.usage = None  # the reference: null in all chunks but the last
        return chunk

    def _usage(self) -> Usage:
        return self._generation.usage(counts_output=not self._completion.is_prompt_only)
