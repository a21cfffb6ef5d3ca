"""Bodies of Anthropic's Messages API, as msgspec structs. What they hold is read by `conversation`
and `tools`; answers are made by `format`."""

from typing import Any, Literal

import msgspec

from api.body import Refusal

NULL = msgspec.Raw(b"null")

# --------------------------------------------------------------------------------------- requests


class Thinking(msgspec.Struct):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """After so many tokens a thought is ended, where its end is one token of the model."""

    display: str | None = None
    """"omitted" leaves thoughts out of the answer."""


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """For templates that read it as `reasoning_effort`."""

    format: msgspec.Raw = NULL
    """A `JsonFormat`: what the answer must look like."""


class JsonFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: msgspec.Raw = NULL


class CountTokensBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: all that the prompt is made of."""

    messages: msgspec.Raw
    model: str | None = None
    """As on all routes, leaving it out means the model that there is."""

    system: msgspec.Raw = NULL
    """A text, or blocks of text."""

    tools: msgspec.Raw = NULL
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: msgspec.Raw = NULL
    """An `OutputConfig`."""

    output_format: msgspec.Raw = NULL
    """What `output_config.format` was called in the beta."""

    chat_template_kwargs: msgspec.Raw = NULL
    """vLLM's: what else the template reads."""


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    """More than the model's length leaves means as much as it leaves."""

    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    """vLLM's: shares cached prefixes only with requests of the same salt."""


# Accepted without an effect: bookkeeping, and hints about caches, speed and price.
_HINTS = frozenset({"cache_control", "diagnostics", "metadata", "service_tier", "speed"})
KNOWN_IN_COUNT = frozenset(CountTokensBody.__struct_fields__) | _HINTS
KNOWN_IN_MESSAGES = frozenset(MessagesBody.__struct_fields__) | _HINTS
UNSUPPORTED = {
    "container": Refusal("this server runs no code of a model"),
    "ec_transfer_params": Refusal("this server computes prompt and answer in one place"),
    "kv_transfer_params": Refusal("this server computes prompt and answer in one place"),
    "mcp_servers": Refusal("this server calls no other one"),
    "vllm_xargs": Refusal("there are no plugins that could read them"),
    "watermarking": Refusal("answers have no watermark"),
}
"""What asks for something that we do not serve; null and empty values ask for nothing."""

# -------------------------------------------------------------------------------------- responses


class Usage(msgspec.Struct):
    """The prompt is all three kinds of input together."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    """What is cached costs nothing here, and so is not counted."""


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


Block = TextBlock | ThinkingBlock | ToolUseBlock

StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


# ----------------------------------------------------------------------------------------- events


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Says nothing."""


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class End(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: End
    usage: Usage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The message is whole."""


Event = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
