"""Bodies of /v1/responses, as msgspec structs: the request, the response, and the events of its
stream.

Clients look for all fields of a response, so all are written; their values are those of the request
where it gives any.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from api.answer_bodies import TokenLogprob
from api.body import Refusal
from api.responses.items import Item, OutputItem, OutputText, ReasoningText
from api.sampling_fields import SamplingFields

# ---------------------------------------------------------------------------------------- request


class StreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None
    """Accepted; nothing is added to hide how long texts are."""


class Reasoning(msgspec.Struct, kw_only=True):
    """How much the model thinks, and what is told of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | UnsetType | None = UNSET
    """The older name of `summary`."""


class ResponsesBody(SamplingFields, kw_only=True):
    """POST /v1/responses. `null` is the same as leaving a field out."""

    model: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"null")
    """A text, or items: `input_items.read`."""

    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    """Of built-in tools; there are none."""

    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: msgspec.Raw = msgspec.Raw(b"null")
    parallel_tool_calls: bool | None = None
    text: msgspec.Raw = msgspec.Raw(b"null")
    """`text_format.read`."""

    reasoning: Reasoning | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None

    # vLLM's additions, beside most of `SamplingFields`.
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"null")

    prompt_cache_key: str | None = None
    """Requests of one key share a rank where that costs nothing, as those of one session."""

    # Accepted without an effect, and shown again in the response.
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None


_STATELESS = Refusal("send the conversation as input, or use previous_response_id")
_TEXT_ONLY = Refusal("prompts and answers are text")

UNSUPPORTED: dict[str, Refusal] = {
    "access_programs": Refusal("this server has none"),
    "background_options": Refusal("a response runs as soon as it can"),
    "context_management": _STATELESS,
    "conversation": _STATELESS,
    "functions": Refusal("send tools"),
    "image": _TEXT_ONLY,
    "logprobs": Refusal("send include, with message.output_text.logprobs"),
    "max_completion_tokens": Refusal("send max_output_tokens"),
    "max_tokens": Refusal("send max_output_tokens"),
    "messages": Refusal("send input"),
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": Refusal(_TEXT_ONLY.reason, (["text"],)),
    "moderation": Refusal("this server judges nobody"),
    "n": Refusal("a response is one answer: ask several times", (1,)),
    "prompt": Refusal("prompts that are kept elsewhere cannot be read: send instructions"),
    "reasoning_effort": Refusal("send reasoning.effort"),
    "response_format": Refusal("send text.format"),
    "structured_outputs": Refusal("output cannot be bound to a grammar yet"),
}
"""Fields of OpenAI and vLLM that ask for something we do not serve, and those of chats that have
other names here."""

_HINTS = frozenset({"prompt_cache_options", "prompt_cache_retention"})
KNOWN = frozenset(ResponsesBody.__struct_fields__) | _HINTS

# --------------------------------------------------------------------------------------- response


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Nobody pays for filling the prefix cache."""


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Error(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class Response(msgspec.Struct, kw_only=True):
    """A response at some moment of its life."""

    id: str
    created_at: int
    status: Status = "in_progress"
    background: bool
    completed_at: int | None = None
    error: Error | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    object: Literal["response"] = "response"
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: Any
    tool_choice: Any
    tools: Any
    top_logprobs: int
    top_p: float
    truncation: str
    usage: Usage | None = None
    user: str | None


class InputTokens(msgspec.Struct):
    """Answer of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Deleted(msgspec.Struct):
    """Answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct):
    """One page of GET /v1/responses/{id}/input_items."""

    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


# ----------------------------------------------------------------------------------------- events


class ResponseEvent(msgspec.Struct, tag_field="type", tag="response"):
    """The state of the response has changed."""

    response: Response
    sequence_number: int = 0


class Created(ResponseEvent, tag="response.created"):
    """The first event."""


class InProgress(ResponseEvent, tag="response.in_progress"):
    """The model is at work."""


class Completed(ResponseEvent, tag="response.completed"):
    """The last event, if all went well."""


class Incomplete(ResponseEvent, tag="response.incomplete"):
    """The last event: the answer was cut off, or the response cancelled."""


class Failed(ResponseEvent, tag="response.failed"):
    """The last event: the server has failed."""


class ItemEvent(msgspec.Struct, tag_field="type", tag="item"):
    """Something about an item."""

    output_index: int
    item: OutputItem
    sequence_number: int = 0


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    """An item begins."""


class ItemDone(ItemEvent, tag="response.output_item.done"):
    """An item is complete."""


class PartEvent(msgspec.Struct, tag_field="type", tag="part"):
    """Something about a part of an item."""

    item_id: str
    output_index: int
    part: OutputText | ReasoningText
    content_index: int = 0
    sequence_number: int = 0


class PartAdded(PartEvent, tag="response.content_part.added"):
    """A part begins."""


class PartDone(PartEvent, tag="response.content_part.done"):
    """A part is complete."""


class TextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta"):
    """More of a message."""

    item_id: str
    output_index: int
    delta: str
    logprobs: list[TokenLogprob] = []
    content_index: int = 0
    sequence_number: int = 0


class TextDone(msgspec.Struct, tag_field="type", tag="response.output_text.done"):
    """A message is complete."""

    item_id: str
    output_index: int
    text: str
    logprobs: list[TokenLogprob] = []
    content_index: int = 0
    sequence_number: int = 0


class ReasoningDelta(msgspec.Struct, tag_field="type", tag="response.reasoning_text.delta"):
    """More of a thought."""

    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    sequence_number: int = 0


class ReasoningDone(msgspec.Struct, tag_field="type", tag="response.reasoning_text.done"):
    """A thought is complete."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    sequence_number: int = 0


class ArgumentsDelta(
    msgspec.Struct, tag_field="type", tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class ArgumentsDone(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.done"):
    """A call is complete."""

    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int = 0


Event = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | Completed
    | Incomplete
    | Failed
)
