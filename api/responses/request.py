"""A request for a response, checked as far as that needs no tokens.

ResponsesBody -> check -> ResponseRequest: tools, sampling, and the response as it begins
"""

import time
from dataclasses import dataclass

import msgspec

from api import prompts, sampling_fields
from api.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_INCLUDED,
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_NAME_CHARS,
    MAX_PRIORITY,
)
from api.responses import text_format
from api.responses import tools as response_tools
from api.responses.protocol import Reasoning, Response, ResponsesBody
from api.responses.text_format import TextFormat
from api.responses.tools import ResponseTools
from api.sampling import SamplingParams
from api.sampling_defaults import SamplingDefaults
from engine.errors import InvalidRequestError
from engine.limits import MAX_LOGPROBS, MAX_TOKEN_ID
from engine.sampling_params import check_range

_NULL = msgspec.Raw(b"null")


_LOGPROBS = "message.output_text.logprobs"
PACKED_THOUGHTS = "reasoning.encrypted_content"
_INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        _LOGPROBS,
        PACKED_THOUGHTS,
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""All but two ask for more of what we never have, which is no mistake."""

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed")

_SUMMARY_FIELDS = ("summary", "generate_summary")
_EFFORT_NAMES = ("reasoning_effort", "enable_thinking")
"""What chat templates call it: how much, or whether at all."""

_read_sampling = sampling_fields.reader()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """What a client asks for."""

    body: ResponsesBody
    params: SamplingParams
    tools: ResponseTools
    text: TextFormat
    variables: dict[str, object]
    """What the chat template reads besides messages and tools."""

    def without_effect(self, template: str) -> list[str]:
        """Fields that change nothing.

        Args:
            template: source of the chat template.
        """
        reasoning = self.body.reasoning or Reasoning()
        names = [f"reasoning.{name}" for name in _SUMMARY_FIELDS if getattr(reasoning, name)]
        if reasoning.effort is not None and not any(name in template for name in _EFFORT_NAMES):
            names.append("reasoning.effort")
        return names


def check(body: ResponsesBody, defaults: SamplingDefaults) -> ResponseRequest:
    """All that can be wrong with a request by itself, but for its input.

    Args:
        body: as decoded.
        defaults: of the model, for fields that say how to sample.

    Raises:
        InvalidRequestError, UnsupportedFieldError: with the name of the field.
    """
    _check_lengths(body)
    _check_choices(body)
    if body.background and body.store is False:
        raise InvalidRequestError(
            "background needs store: the response is fetched from there", "background"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", "stream_options")
    check_range("priority", body.priority or 0, -MAX_PRIORITY, MAX_PRIORITY)
    effort = body.reasoning.effort if body.reasoning is not None else None
    return ResponseRequest(
        body=body,
        params=_sampling_params(body, defaults),
        tools=response_tools.read(body.tools, body.tool_choice, body.parallel_tool_calls),
        text=text_format.read(body.text),
        variables=prompts.template_variables(body.chat_template_kwargs, effort),
    )


def new_response(
    request: ResponseRequest, response_id: str, model: str, *, is_kept: bool
) -> Response:
    """The response as it begins."""
    body, params = request.body, request.params
    return Response(
        id=response_id,
        created_at=int(time.time()),
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or Reasoning(),
        safety_identifier=body.safety_identifier,
        store=is_kept,
        temperature=params.temperature,
        text=request.text.shown,
        tool_choice=_given(body.tool_choice, "auto"),
        tools=_given(body.tools, []),
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _given(raw: msgspec.Raw, default: object) -> object:
    """A field as the client wrote it."""
    return default if raw == _NULL else msgspec.Raw(bytes(raw))


def _sampling_params(body: ResponsesBody, defaults: SamplingDefaults) -> SamplingParams:
    max_tokens = body.max_output_tokens
    if max_tokens is not None:
        check_range("max_output_tokens", max_tokens, 1, MAX_TOKEN_ID)
        max_tokens = defaults.cap(max_tokens)
    if body.max_tool_calls is not None:
        check_range("max_tool_calls", body.max_tool_calls, 1, MAX_TOKEN_ID)
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    wants_logprobs = _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        **_read_sampling(body, defaults.values),
    )


def _check_choices(body: ResponsesBody) -> None:
    """Fields of which only some values are there, or served."""
    included = body.include or ()
    if len(included) > MAX_INCLUDED:
        raise InvalidRequestError(
            f"include holds {len(included)} names; {MAX_INCLUDED} are the most", "include"
        )
    for i, name in enumerate(included):
        _check_choice(f"include[{i}]", name, _INCLUDABLE)
    if body.reasoning is not None:
        _check_choice("reasoning.effort", body.reasoning.effort, _EFFORTS)
        _check_choice("reasoning.summary", body.reasoning.summary, _SUMMARIES)
        summary = body.reasoning.generate_summary or None
        _check_choice("reasoning.generate_summary", summary, _SUMMARIES)
    _check_choice("truncation", body.truncation, ("auto", "disabled"))


def _check_choice(
    name: str, value: str | None, choices: "frozenset[str] | tuple[str, ...]"
) -> None:
    if value is not None and value not in choices:
        shown = ", ".join(sorted(choices) if isinstance(choices, frozenset) else choices)
        raise InvalidRequestError(f"{name} must be one of {shown}, not {value[:40]!r}", name)


def _check_lengths(body: ResponsesBody) -> None:
    for name in ("user", "safety_identifier", "prompt_cache_key", "service_tier"):
        if len(getattr(body, name) or "") > MAX_NAME_CHARS:
            raise InvalidRequestError(f"{name} has at most {MAX_NAME_CHARS} characters", name)
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt"
        )
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(f"metadata holds at most {MAX_METADATA} pairs", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise InvalidRequestError(
                f"metadata: a key has at most {MAX_METADATA_KEY_CHARS} characters, a value"
                f" {MAX_METADATA_VALUE_CHARS}",
                "metadata",
            )
