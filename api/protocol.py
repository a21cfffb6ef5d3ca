"""Request and response bodies of the OpenAI routes, as msgspec structs.

Requests are decoded by `body`; responses and chunks are encoded straight to bytes. Fields that only
some requests ask for are UNSET unless they are there; the others are always written, since clients
look for them (`finish_reason`, `logprobs`, `cached_tokens`).
"""

from operator import attrgetter
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from api.sampling import SamplingParams
from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_LOGPROBS, RepetitionDetection, check_range

MAX_CACHE_SALT_CHARS = 256
MAX_PRIORITY = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
"""As in OpenAI's reference; less where the model's length leaves less."""

# --------------------------------------------------------------------------------------- requests


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """A last chunk with the usage of the whole request."""

    continuous_usage_stats: bool | None = None
    """With `include_usage`: the usage so far in every chunk."""


class RepetitionFields(msgspec.Struct, kw_only=True):
    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 4


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both routes share. `null` is the same as leaving a field out."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[int, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    repetition_detection: RepetitionFields | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    split_special_tokens: bool | None = None
    """Special tokens that are written out in the request are text like any other: true in a chat,
    false in a prompt, unless it says otherwise."""

    return_token_ids: bool | None = None

    # Accepted without an effect: they say who asks or ask for bookkeeping, not for another answer.
    user: str | None = None

    def check(self, max_n: int) -> None:
        """Check what no single type can. Raises InvalidRequestError."""
        check_range("n", self.num_choices, 1, max_n)
        if self.best_of not in (None, self.num_choices):
            raise InvalidRequestError("best_of must be equal to n: no other is served", "best_of")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs"
            )
        check_range("priority", self.priority or 0, -MAX_PRIORITY, MAX_PRIORITY)
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt has 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt"
            )

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """The usage in every chunk; asks for nothing without the usage chunk."""
        options = self.stream_options
        return options is not None and self.has_usage_chunk and bool(options.continuous_usage_stats)

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The fields that say how to sample, checked. Raises InvalidRequestError."""
        values = zip(_SAMPLING_FIELDS, _sampling_fields(self), strict=True)
        given = {name: value for name, value in values if value is not None}
        if self.repetition_detection is not None:
            r = self.repetition_detection
            given["repetition_detection"] = RepetitionDetection(
                r.max_pattern_size, r.min_pattern_size, r.min_count
            )
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
)


_sampling_fields = attrgetter(*_SAMPLING_FIELDS)


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")
    """A text, a list of texts, a list of token ids, or a list of such lists: `prompts.read`."""

    logprobs: int | None = None
    """Alternatives per token; 0 is the sampled token alone."""

    echo: bool | None = None
    """The prompt's text first, with `logprobs` also its log probabilities."""

    @property
    def is_prompt_only(self) -> bool:
        """`echo` and no new token: a way to ask for the prompt's log probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def generation_params(self) -> SamplingParams:
        """How to sample, checked."""
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        # The engine always makes a token; the route leaves it out.
        max_tokens = 1 if self.is_prompt_only else self.max_tokens
        params = self.sampling_params(max_tokens, self.logprobs)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            params = msgspec.structs.replace(params, prompt_logprobs=self.logprobs)
        return params


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: msgspec.Raw
    """What was said so far: `prompts.read_messages`."""

    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`; wins where both are given and equal."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"null")
    """What else the template reads: `prompts.template_variables`."""

    tools: msgspec.Raw = msgspec.Raw(b"null")
    """What the model may call: this field and the next two are read by `tools.request`."""

    tool_choice: msgspec.Raw = msgspec.Raw(b"null")
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """False leaves thoughts out of the answer, where they are told apart."""

    def generation_params(self) -> SamplingParams:
        """How to sample, checked."""
        return self.sampling_params(self._max_tokens(), self._num_logprobs())

    def _max_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens"
                f" ({self.max_completion_tokens}) differ; give one of them",
                "max_completion_tokens",
            )
        check_range("max_completion_tokens", self.max_completion_tokens, 1, 2**31 - 1)
        return self.max_completion_tokens

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is not None:
            check_range("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
            if self.top_logprobs and not self.logprobs:
                raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def has_generation_prompt(self) -> bool:
        """By default unless the last message is to be continued."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                "continue_final_message",
            )
        return self.add_generation_prompt


# Fields of OpenAI and vLLM that ask for something we do not serve (yet). The values beside them ask
# for nothing, as do null, false and empty ones.
_UNSUPPORTED_IN_BOTH: dict[str, tuple[object, ...]] = {
    "bad_words": (),
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "logprob_token_ids": (),
    "lora_request": (),
    "pooling_params": (),
    "prompt_embeds": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (),
    "return_token_offsets": (),
    "return_tokens_as_token_ids": (),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (),
    "vllm_xargs": (),
    "watermarking": (),
}
UNSUPPORTED_IN_COMPLETIONS = _UNSUPPORTED_IN_BOTH | {"suffix": ()}
UNSUPPORTED_IN_CHAT = _UNSUPPORTED_IN_BOTH | {
    "audio": (),
    "chat_template": (),
    "documents": (),
    "echo": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "reasoning": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Accepted without an effect, and not worth a warning: bookkeeping, and hints about speed or price.
_HINTS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
    }
)
KNOWN_IN_COMPLETIONS = frozenset(CompletionBody.__struct_fields__) | _HINTS
KNOWN_IN_CHAT = frozenset(ChatBody.__struct_fields__) | _HINTS

# -------------------------------------------------------------------------------------- responses


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """Answer of /v1/completions, and each chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """JSON, if the model has written JSON."""


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    """What the model thought: in vLLM's name for it, and in the older one, which more clients
    know."""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class FunctionCallDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The first of a call has all fields, and no arguments yet; the others have only those."""

    index: int
    """Of the call in the answer."""
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelPermission(msgspec.Struct):
    """OpenAI's old list of what one may do, which vLLM writes and some clients read."""

    id: str
    created: int
    object: Literal["model_permission"] = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str
    permission: list[ModelPermission]
    owned_by: str = "raywire"
    parent: None = None
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"
