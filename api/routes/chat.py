"""POST /v1/chat/completions."""

import time
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from api import (
    answer,
    body,
    errors,
    logprobs,
    message_plan,
    openapi_fields,
    prompts,
    sse,
)
from api.answer_bodies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from api.choosing import generation_for
from api.conversation import Conversation
from api.fields import KNOWN_IN_CHAT, NESTED, UNSUPPORTED_IN_CHAT
from api.generate import Batch, Generation, Prompt
from api.ids import answer_id
from api.output_processor import OutputDelta
from api.protocol import ChatBody
from api.routes.chat_messages import MessageWriter
from api.routing import Route
from api.service import Service
from api.tools import request as tool_request
from engine.errors import InvalidRequestError, UnsupportedFieldError

_DECODER = msgspec.json.Decoder(ChatBody)


def routes(service: Service) -> list[Route]:
    async def create_chat_completion(request: Request) -> Response:
        return await answer.respond(service, request, await read_job(service, request))

    return [
        Route(
            ("POST",),
            "/v1/chat/completions",
            create_chat_completion,
            is_hot=True,
            generates=True,
            summary="The next message of a conversation",
            body=ChatBody,
            raw_fields=openapi_fields.chat(service.config.max_n),
            example=openapi_fields.CHAT_EXAMPLE,
            answer=ChatCompletion,
            event=ChatChunk,
        )
    ]


async def read_job(service: Service, request: Request) -> answer.Job:
    """What a request asks for: everything that can be wrong without looking at tokens."""
    raw = await service.bodies.read(request)
    arrived_at = time.monotonic()
    chat, ignored = body.decode(raw, _DECODER, KNOWN_IN_CHAT, UNSUPPORTED_IN_CHAT, NESTED)
    return _job(service, chat, len(raw), arrived_at, body.ignored_header(ignored))


def read_conversation(service: Service, chat: ChatBody) -> Conversation:
    """The conversation of a request, checked as far as that needs no tokens."""
    service.check_model_name(chat.model)
    chat.check(service.config.max_n)
    answer.check_priority(chat.priority, service)
    tools = tool_request.read(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    if tools is not None and tools.is_bound and chat.use_beam_search:
        raise InvalidRequestError("calls cannot be enforced with use_beam_search", "tool_choice")
    return Conversation(
        read_messages=partial(prompts.read_messages, chat.messages),
        plan=message_plan.make(service.model.markup, tools, chat.include_reasoning),
        params=answer.sampling_params(chat, service),
        read_wanted=chat.read_wanted,
        answer_id=answer_id("chatcmpl-", chat.request_id),
        variables=prompts.template_variables(chat.chat_template_kwargs, chat.reasoning_effort),
        read_documents=partial(prompts.read_documents, chat.documents),
        template=_template(service, chat),
        add_generation_prompt=chat.has_generation_prompt,
        continue_final_message=bool(chat.continue_final_message),
        is_echoed=bool(chat.echo),
        truncation=chat.truncation,
        add_special_tokens=bool(chat.add_special_tokens),
        split_special_tokens=chat.split_special_tokens is not False,
        priority=chat.priority or 0,
        cache_salt=chat.cache_salt,
    )


def _job(
    service: Service, chat: ChatBody, num_bytes: int, arrived_at: float, headers: dict[str, str]
) -> answer.Job:
    conversation = read_conversation(service, chat)

    def make_format(generation: Generation, prompts_: list[Prompt]) -> answer.Format:
        name = chat.model or service.config.served_model_names[0]
        return _ChatFormat(
            conversation,
            name,
            chat,
            generation,
            prompts_[0],
            has_ids_for_tokens=answer.has_ids_for_tokens(chat, service),
        )

    return answer.Job(
        bool(chat.stream),
        conversation.params,
        conversation.prepare,
        make_format,
        headers,
        arrived_at,
        num_bytes,
        num_sequences=chat.num_sequences,
        render_s=_render_s(service, chat),
        kept_token_ids=conversation.plan.kept_token_ids,
        make_generation=generation_for(chat, conversation.params),
        session=chat.session_id,
    )


def _render_s(service: Service, chat: ChatBody) -> float:
    """How long rendering takes at least; a template that comes with the request is compiled."""
    return service.model.template.short_render_s if chat.chat_template is None else 1.0


def _template(service: Service, chat: ChatBody) -> str | None:
    """The template that a client brings, if we take one from it."""
    if chat.chat_template is not None and not service.config.trust_request_chat_template:
        raise UnsupportedFieldError(
            "chat_template is not supported by this server: templates of clients need a start with"
            " --trust-request-chat-template",
            "chat_template",
        )
    return chat.chat_template


class _ChatFormat:
    """The answer to one chat request, whole or in chunks."""

    def __init__(
        self,
        conversation: Conversation,
        model: str,
        chat: ChatBody,
        generation: Generation,
        prompt: Prompt,
        *,
        has_ids_for_tokens: bool,
    ) -> None:
        plan = conversation.plan
        self._id = conversation.answer_id
        self._model = model
        self._created = answer.now()
        self._chat = chat
        self._generation = generation
        self._prompt = prompt
        self._waiting = [answer.Part() for _ in range(generation.num_choices)]
        self._is_begun = False
        self._has_ids_for_tokens = has_ids_for_tokens
        self._writers = (
            None
            if plan.is_plain
            else [MessageWriter(plan, is_thinking=prompt.is_thinking) for _ in self._waiting]
        )
        is_plain = not (chat.return_token_ids or chat.logprobs or chat.has_running_usage)
        self._text_events = sse.TextEvents(self._text_chunk) if is_plain else None
        """Of chunks that have nothing but text, where only the last has more."""

    def chunks(self, batch: Batch) -> bytes:
        events = []
        if not self._is_begun:
            self._is_begun = True
            indices = range(len(self._waiting))
            events += [self._role_chunk(i) for i in indices]
            if self._prompt.beginning:
                events += [sse.event(self._text_chunk(i, self._prompt.beginning)) for i in indices]
        for choice, delta in batch:
            if self._text_events is None or delta.finish_reason is not None:
                events += self._full_chunks(choice.index, delta)
            elif delta.text and self._writers is None:
                events.append(self._text_events.event(choice.index, delta.text))
            elif delta.text and self._writers is not None:
                for news in self._writers[choice.index].deltas(delta.text, is_last=False):
                    events.append(self._news_event(self._text_events, choice.index, news))
        return b"".join(events)

    def last_chunks(self) -> bytes:
        if not self._chat.has_usage_chunk:
            return sse.DONE
        return self._chunk([], has_usage=True) + sse.DONE

    def failed(self, failure: errors.Failure) -> bytes:
        return sse.failed(failure)

    async def whole(self) -> ChatCompletion:
        parts = await answer.collect(self._generation)
        prompt_logprobs = parts[0].prompt_logprobs
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, part) for index, part in enumerate(parts)],
            usage=self._generation.usage(),
            prompt_token_ids=self._prompt.token_ids if self._chat.return_token_ids else UNSET,
            prompt_text=self._prompt.text if self._chat.return_prompt_text else UNSET,
            prompt_logprobs=(
                logprobs.for_prompt(prompt_logprobs or [])
                if self._chat.prompt_logprobs is not None
                else UNSET
            ),
        )

    def _full_chunks(self, index: int, delta: OutputDelta) -> list[bytes]:
        """Chunks that say more than a text."""
        part = self._waiting[index]
        part.add(delta)
        if self._writers is not None:
            return self._message_chunks(self._writers[index], index, part)
        if not self._can_be_shown(part):
            return []
        self._waiting[index] = answer.Part()
        content = ChatDelta(content="".join(part.text)) if part.text else ChatDelta()
        return [self._chunk([self._chunk_choice(index, part, content)])]

    def _news_event(self, text_events: sse.TextEvents, index: int, news: ChatDelta) -> bytes:
        if isinstance(news.content, str):
            return text_events.event(index, news.content)
        return self._chunk([ChatChunkChoice(index, news, None, None)])

    def _message_chunks(self, writer: MessageWriter, index: int, part: answer.Part) -> list[bytes]:
        """What is new in a message that may hold calls and thoughts. Each chunk has one kind of
        news; what is said of tokens is in the last."""
        is_last = part.finish_reason is not None
        is_cut = part.finish_reason == "length"
        deltas = writer.deltas("".join(part.text), is_last=is_last, is_cut=is_cut)
        part.text.clear()
        if is_last or (self._can_be_shown(part) and not deltas):
            deltas.append(ChatDelta())
        if not deltas:
            return []
        self._waiting[index] = answer.Part()
        part.finish_reason = writer.finish_reason(part.finish_reason)
        *earlier, last = deltas
        return [
            *(self._chunk([ChatChunkChoice(index, delta, None, None)]) for delta in earlier),
            self._chunk([self._chunk_choice(index, part, last)]),
        ]

    def _choice(self, index: int, part: answer.Part) -> ChatChoice:
        text = "".join(part.text)
        finish_reason = part.finish_reason
        if self._writers is None:
            message = ChatMessage("assistant", text)
        else:
            message = self._writers[index].message(text, is_cut=finish_reason == "length")
            finish_reason = self._writers[index].finish_reason(finish_reason)
        if self._prompt.beginning:
            message.content = self._prompt.beginning + (message.content or "")
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(part),
            finish_reason=finish_reason,
            stop_reason=part.stop_reason,
            token_ids=self._token_ids(part),
        )

    def _text_chunk(self, index: int, text: str) -> ChatChunk:
        return self._chunk_body([ChatChunkChoice(index, ChatDelta(content=text), None, None)])

    def _can_be_shown(self, part: answer.Part) -> bool:
        """No chunk without content, but for the last one, and where token ids were asked for."""
        has_tokens = bool(self._chat.return_token_ids and part.token_ids)
        return bool(part.text) or part.finish_reason is not None or has_tokens

    def _role_chunk(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        chunk = self._chunk_body([ChatChunkChoice(index, delta, None, None)])
        if index == 0:  # what is said of the prompt comes once
            if self._chat.return_token_ids:
                chunk.prompt_token_ids = self._prompt.token_ids
            if self._chat.return_prompt_text:
                chunk.prompt_text = self._prompt.text
        return sse.event(chunk)

    def _chunk_choice(self, index: int, part: answer.Part, delta: ChatDelta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(part),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason if part.finish_reason is not None else UNSET,
            token_ids=self._token_ids(part),
        )

    def _chunk(self, choices: list[ChatChunkChoice], has_usage: bool = False) -> bytes:
        return sse.event(self._chunk_body(choices, has_usage))

    def _chunk_body(self, choices: list[ChatChunkChoice], has_usage: bool = False) -> ChatChunk:
        chunk = ChatChunk(self._id, self._created, self._model, choices)
        if has_usage or self._chat.has_running_usage:
            chunk.usage = self._generation.usage()
        elif self._chat.has_usage_chunk:
            chunk.usage = None  # the reference: null in all chunks but the last
        return chunk

    def _logprobs(self, part: answer.Part) -> ChatLogprobs | None:
        if not (self._chat.logprobs and part.logprobs):
            return None
        return logprobs.for_chat(part.logprobs, has_token_ids=self._has_ids_for_tokens)

    def _token_ids(self, part: answer.Part) -> list[int] | UnsetType:
        return part.token_ids if self._chat.return_token_ids else UNSET
