"""POST /v1/messages, /v1/messages/count_tokens and /v1/messages/render: Anthropic's API.

A request becomes a chat request with other words for its messages (`api.anthropic`), so that both
APIs have the same limits, tools and templates; the answer becomes Anthropic's message.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api import answer, body, text_call, thinking_budget
from api.anthropic import conversation as messages
from api.anthropic import openapi_fields, tools
from api.anthropic.format import MessageFormat
from api.anthropic.protocol import (
    KNOWN_IN_COUNT,
    KNOWN_IN_MESSAGES,
    NULL,
    UNSUPPORTED,
    CountTokensBody,
    Event,
    JsonFormat,
    Message,
    MessagesBody,
    OutputConfig,
    TokenCount,
)
from api.body import decode_field
from api.conversation import Conversation
from api.generate import Generation, Prompt
from api.ids import new_id
from api.message_plan import MessageReader
from api.protocol import ChatBody
from api.routes import chat, render
from api.routing import Route
from api.sampling import check_stop
from api.service import LoadedModel, Service
from api.structured import fields
from api.structured.fields import Wanted
from engine.errors import InvalidRequestError
from engine.limits import MAX_TOKEN_ID
from engine.sampling_params import check_range

_MESSAGES = msgspec.json.Decoder(MessagesBody)
_COUNT = msgspec.json.Decoder(CountTokensBody)
_OUTPUT_CONFIG = msgspec.json.Decoder(OutputConfig | None).decode
_JSON_FORMAT = msgspec.json.Decoder(JsonFormat).decode


def routes(service: Service) -> list[Route]:
    async def create_message(request: Request) -> Response:
        with tools.own_names():
            return await answer.respond(service, request, await read_job(service, request))

    show_prompt = render.endpoint(service, read_job, is_list=False)

    async def render_message(request: Request) -> Response:
        with tools.own_names():
            return await show_prompt(request)

    async def count_tokens(request: Request) -> Response:
        raw = await service.bodies.read(request)
        asked, ignored = body.decode(raw, _COUNT, KNOWN_IN_COUNT, UNSUPPORTED)
        conversation = _conversation(service, asked, _as_chat(asked))

        def call(model: LoadedModel) -> TokenCount:
            return TokenCount(len(conversation.render(model).token_ids))

        headers = body.ignored_header([*ignored, *_without_effect(service, asked)])
        return await text_call.respond(service, request, call, len(raw), headers)

    return [
        Route(
            ("POST",),
            "/v1/messages",
            create_message,
            is_hot=True,
            generates=True,
            summary="The answer to a conversation, in Anthropic's form",
            body=MessagesBody,
            raw_fields=openapi_fields.FIELDS,
            example=openapi_fields.EXAMPLE,
            answer=Message,
            event=Event,
        ),
        Route(
            ("POST",),
            "/v1/messages/count_tokens",
            count_tokens,
            summary="How many tokens a conversation has",
            body=CountTokensBody,
            raw_fields=openapi_fields.COUNT_FIELDS,
            example=openapi_fields.COUNT_EXAMPLE,
            answer=TokenCount,
        ),
        Route(
            ("POST",),
            "/v1/messages/render",
            render_message,
            summary="The prompt and the parameters of a conversation, without an answer",
            body=MessagesBody,
            raw_fields=openapi_fields.FIELDS,
            example=openapi_fields.EXAMPLE,
            answer=render.RenderedPrompt,
        ),
    ]


async def read_job(service: Service, request: Request) -> answer.Job:
    """What a request asks for: everything that can be wrong without looking at tokens."""
    raw = await service.bodies.read(request)
    arrived_at = time.monotonic()
    asked, ignored = body.decode(raw, _MESSAGES, KNOWN_IN_MESSAGES, UNSUPPORTED)
    conversation = _conversation(service, asked, _as_generating_chat(service, asked))
    plan = conversation.plan

    def make_format(generation: Generation, prompts: list[Prompt]) -> answer.Format:
        reader = MessageReader(plan, is_thinking=prompts[0].is_thinking)
        name = asked.model or service.config.served_model_names[0]
        return MessageFormat(
            conversation.answer_id,
            name,
            service.model.sampling_defaults.cap(asked.max_tokens),
            generation,
            reader,
            is_plain=plan.is_plain,
        )

    return answer.Job(
        bool(asked.stream),
        conversation.params,
        conversation.prepare,
        make_format,
        body.ignored_header([*ignored, *_without_effect(service, asked)]),
        arrived_at,
        len(raw),
        num_sequences=1,
        render_s=service.model.template.short_render_s,
        kept_token_ids=plan.kept_token_ids,
    )


def _as_chat(asked: CountTokensBody) -> ChatBody:
    """The chat request that asks for the same; what was said is still to come."""
    thinking, choice = asked.thinking, asked.tool_choice
    is_hidden = thinking is not None and (
        thinking.type == "disabled" or thinking.display == "omitted"
    )
    return ChatBody(
        model=asked.model,
        messages=NULL,
        tools=tools.as_functions(asked.tools),
        tool_choice=tools.as_choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        include_reasoning=not is_hidden,
        chat_template_kwargs=asked.chat_template_kwargs,
    )


def _as_generating_chat(service: Service, asked: MessagesBody) -> ChatBody:
    check_range("max_tokens", asked.max_tokens, 1, MAX_TOKEN_ID)
    if asked.stop_sequences is not None:
        check_stop(asked.stop_sequences, "stop_sequences")
    budget = _budget(asked)
    if budget is not None:
        _check_budget(budget, asked.max_tokens)
    return msgspec.structs.replace(
        _as_chat(asked),
        max_tokens=asked.max_tokens,
        stop=asked.stop_sequences,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        cache_salt=asked.cache_salt,
        thinking_token_budget=budget if _keeps_budgets(service) else None,
    )


def _budget(asked: CountTokensBody) -> int | None:
    return None if asked.thinking is None else asked.thinking.budget_tokens


def _keeps_budgets(service: Service) -> bool:
    """Where nobody can tell a thought's end, a budget is ignored: coding agents always send one."""
    return thinking_budget.can_be_kept(service.model.markup, service.model.tokenizer)


def _check_budget(budget_tokens: int, max_tokens: int) -> None:
    name = "thinking.budget_tokens"
    check_range(name, budget_tokens, 1, MAX_TOKEN_ID)
    if budget_tokens >= max_tokens:
        raise InvalidRequestError(f"{name} must be below max_tokens ({max_tokens})", name)


def _conversation(service: Service, asked: CountTokensBody, as_chat: ChatBody) -> Conversation:
    """The conversation of a request, checked as far as that needs no tokens."""
    conversation = chat.read_conversation(service, as_chat)
    given = messages.decode(asked.messages)
    is_prefilled = given[-1].role == "assistant"  # the model goes on where it ends
    return replace(
        conversation,
        read_wanted=partial(_read_wanted, asked),
        read_messages=partial(messages.read, asked.system, given, service.model.template),
        answer_id=new_id("msg_"),
        variables=_template_variables(asked) | conversation.variables,
        add_generation_prompt=not is_prefilled,
        continue_final_message=is_prefilled,
        cuts_max_tokens=True,
    )


def _read_wanted(asked: CountTokensBody) -> Wanted | None:
    """What the answer must look like: `output_config.format`, or its name in the beta."""
    config = _output_config(asked)
    for raw, place in (
        (NULL if config is None else config.format, "output_config.format"),
        (asked.output_format, "output_format"),
    ):
        if raw != NULL:
            form = decode_field(_JSON_FORMAT, raw, place)
            return fields.under_schema(form.schema, place, is_strict=True)
    return None


def _template_variables(asked: CountTokensBody) -> dict[str, Any]:
    """Whether to think, in the words of Qwen's templates and others, and of DeepSeek's; and how
    much."""
    variables: dict[str, Any] = {}
    if asked.thinking is not None:
        variables["enable_thinking"] = variables["thinking"] = asked.thinking.type != "disabled"
    config = _output_config(asked)
    if config is not None and config.effort is not None:
        variables["reasoning_effort"] = config.effort
    return variables


def _without_effect(service: Service, asked: CountTokensBody) -> list[str]:
    """Fields inside others that are accepted and ignored."""
    is_ignored = _budget(asked) is not None and not _keeps_budgets(service)
    return ["thinking.budget_tokens"] if is_ignored else []


def _output_config(asked: CountTokensBody) -> OutputConfig | None:
    return decode_field(_OUTPUT_CONFIG, asked.output_config, "output_config")
