"""Request bodies of the generating routes, as msgspec structs. Decoded by `body`, checked by
themselves; what they do not have is in `fields`, what is answered in `answer_bodies`."""

from operator import attrgetter
from typing import Literal

import msgspec

from api import sampling_fields
from api.ids import is_safe
from api.limits import (
    MAX_BEAMS,
    MAX_CACHE_SALT_CHARS,
    MAX_ID_CHARS,
    MAX_LENGTH_PENALTY,
    MAX_PRIORITY,
)
from api.sampling import SamplingParams
from api.sampling_defaults import SamplingDefaults
from api.sampling_fields import SamplingFields
from api.structured import fields
from api.structured.fields import Wanted
from api.truncation import Truncation
from engine.errors import InvalidRequestError
from engine.limits import MAX_LOGPROBS, MAX_TOKEN_ID
from engine.sampling_params import RepetitionDetection, check_range


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """A last chunk with the usage of the whole request."""

    continuous_usage_stats: bool | None = None
    """With `include_usage`: the usage so far in every chunk."""


class RepetitionFields(msgspec.Struct, kw_only=True):
    max_pattern_size: int = 0
    """0: no detection."""
    min_pattern_size: int = 0
    """0 is 1, as in vLLM."""
    min_count: int = 4


class GenerationBody(SamplingFields, kw_only=True):
    """What completions and chats share. `null` is the same as leaving a field out."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    """Words that the answer must not hold."""
    logprob_token_ids: list[int] | None = None
    """With log probabilities: those of these tokens at each place, instead of the best ones'."""
    repetition_detection: RepetitionFields | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    split_special_tokens: bool | None = None
    """Special tokens that are written out in the request are text like any other: true in a chat,
    false in a prompt, unless it says otherwise."""

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens in log probabilities are written `token_id:7`. Default: the server's setting."""

    thinking_token_budget: int | None = None
    """Tokens that a thought may have: `thinking_budget.make`. -1: as many as it likes."""

    # What few requests have: `_check_rare` reads these.
    best_of: int | None = None
    """As many continuations are made of which the `n` likeliest are shown."""
    use_beam_search: bool | None = None
    """The `n` likeliest continuations that a search finds, instead of random ones."""
    length_penalty: float | None = None
    """Of beam search: above 1 favours long answers."""
    truncate_prompt_tokens: int | None = None
    """Tokens of the prompt that are kept; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """Where the others are cut off."""
    stream_interval: int | None = None
    """Tokens in a chunk of a stream, but for the first and the last."""
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    """The client's name for the request, which ends the id of its answer."""
    session_id: str | None = None
    """As the header X-Session-ID."""

    # What the output must look like: read by `structured.fields`.
    response_format: msgspec.Raw = fields.NULL
    structured_outputs: msgspec.Raw = fields.NULL
    guided_json: msgspec.Raw = fields.NULL
    guided_regex: msgspec.Raw = fields.NULL
    guided_choice: msgspec.Raw = fields.NULL
    guided_grammar: msgspec.Raw = fields.NULL
    guided_whitespace_pattern: msgspec.Raw = fields.NULL

    user: str | None = None
    """Without an effect."""

    def check(self, max_n: int) -> None:
        """Check what no single type can. Raises InvalidRequestError."""
        check_range("n", self.num_choices, 1, max_n)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs"
            )
        if _rare_fields(self) != _NO_RARE_FIELDS:
            self._check_rare(max_n)

    def _check_rare(self, max_n: int) -> None:
        if self.best_of is not None:
            self._check_best_of(self.best_of, max_n)
        if self.use_beam_search:
            self._check_beam_search()
        elif self.length_penalty not in (None, 1.0):
            raise InvalidRequestError("length_penalty needs use_beam_search", "length_penalty")
        if self.stream_interval is not None:
            check_range("stream_interval", self.stream_interval, 1, MAX_TOKEN_ID)
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequestError(
                "truncation_side needs truncate_prompt_tokens", "truncation_side"
            )
        check_range("priority", self.priority or 0, -MAX_PRIORITY, MAX_PRIORITY)
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt has 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt"
            )
        if self.request_id is not None and not is_safe(self.request_id):
            raise InvalidRequestError(
                f"request_id has 1 to {MAX_ID_CHARS} characters of A-Z, a-z, 0-9 and ._:/=+@-",
                "request_id",
            )

    def _check_best_of(self, best_of: int, max_n: int) -> None:
        check_range("best_of", best_of, self.num_choices, max_n)
        if best_of > self.num_choices and self.stream:
            raise InvalidRequestError(
                "best_of cannot be streamed: what is best shows at the end", "best_of"
            )

    def _check_beam_search(self) -> None:
        """Refuse what a search for the likeliest answer would not do; what says how to draw one
        (temperature, top_p, seed, ...) has no say in it."""
        check_range("n", self.num_choices, 1, MAX_BEAMS)
        check_range(
            "length_penalty", self.length_penalty or 0.0, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        if self.thinking_token_budget not in (None, -1):
            raise InvalidRequestError(
                "thinking_token_budget has no effect with use_beam_search", "thinking_token_budget"
            )
        for name, value in zip(_NOT_WITH_BEAMS, _not_with_beams(self), strict=True):
            if value not in _EMPTY and value != _NEUTRAL.get(name):
                raise InvalidRequestError(f"{name} has no effect with use_beam_search", name)

    def read_wanted(self) -> Wanted | None:
        """What the output must look like. Takes milliseconds for long schemas.

        Raises:
            InvalidRequestError: it is malformed or too large, or said twice.
        """
        values = zip(fields.NAMES, _wanted_fields(self), strict=True)
        wanted = fields.read({name: value for name, value in values if value != fields.NULL})
        if wanted is not None and self.use_beam_search:
            raise InvalidRequestError(
                f"{wanted.field} has no effect with use_beam_search", wanted.field
            )
        return wanted

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_sequences(self) -> int:
        """Continuations of each prompt that are computed."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def truncation(self) -> Truncation | None:
        """What is to be left of the prompt; None: all of it."""
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "left")

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """The usage in every chunk; asks for nothing without the usage chunk."""
        options = self.stream_options
        return options is not None and self.has_usage_chunk and bool(options.continuous_usage_stats)

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, defaults: SamplingDefaults
    ) -> SamplingParams:
        """The fields that say how to sample, checked. Raises InvalidRequestError."""
        given = _read_sampling(self, defaults.values)
        if max_tokens is not None:
            max_tokens = defaults.cap(max_tokens)
        if self.best_of is not None:
            given["n"] = self.best_of
            if self.best_of > self.num_choices and logprobs is None:
                logprobs = 0  # to tell which are best
        if self.repetition_detection is not None and self.repetition_detection.max_pattern_size:
            r = self.repetition_detection
            given["repetition_detection"] = RepetitionDetection(
                r.max_pattern_size, r.min_pattern_size or 1, r.min_count
            )
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


_read_sampling = sampling_fields.reader("n", "prompt_logprobs", "bad_words", "logprob_token_ids")
_wanted_fields = attrgetter(*fields.NAMES)

_RARE_FIELDS = (
    "best_of",
    "use_beam_search",
    "length_penalty",
    "truncation_side",
    "stream_interval",
    "priority",
    "cache_salt",
    "request_id",
)
_rare_fields = attrgetter(*_RARE_FIELDS)
_NO_RARE_FIELDS = (None,) * len(_RARE_FIELDS)

_NOT_WITH_BEAMS = (
    "best_of",
    "stop",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprob_token_ids",
    "prompt_logprobs",
    "repetition_detection",
)
_not_with_beams = attrgetter(*_NOT_WITH_BEAMS)
_EMPTY: tuple[object, ...] = (None, 0, "", [], {})
_NEUTRAL = {"repetition_penalty": 1.0}


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")
    """A text, a list of token ids, or a list of either: `prompts.read`."""

    logprobs: int | None = None
    """Alternatives per token; 0 is the sampled token alone."""

    echo: bool | None = None
    """The prompt's text first, with `logprobs` also its log probabilities."""

    @property
    def is_prompt_only(self) -> bool:
        """`echo` and no new token: a way to ask for the prompt's log probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def generation_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """How to sample, checked."""
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        elif self.logprob_token_ids:
            raise InvalidRequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
        if self.logprob_token_ids and self.is_prompt_only:
            raise InvalidRequestError(
                "logprob_token_ids tells of new tokens, and max_tokens is 0", "logprob_token_ids"
            )
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "echo with logprobs has no effect with use_beam_search", "echo"
            )
        # The engine always makes a token; the route leaves it out.
        max_tokens = 1 if self.is_prompt_only else self.max_tokens
        params = self.sampling_params(max_tokens, self.logprobs, defaults)
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
    echo: bool | None = None
    """The text of the last message first, if it is the assistant's."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    """Jinja text in place of the model's own template, where the server trusts its clients."""
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"null")
    """What else the template reads: `prompts.template_variables`."""
    documents: msgspec.Raw = msgspec.Raw(b"null")
    """For templates that quote documents: `prompts.read_documents`."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """For templates that read it. Any but "none" sets `enable_thinking` too."""
    return_prompt_text: bool | None = None

    tools: msgspec.Raw = msgspec.Raw(b"null")
    """What the model may call: this field and the next two are read by `tools.request`."""

    tool_choice: msgspec.Raw = msgspec.Raw(b"null")
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """False leaves thoughts out of the answer, where they are told apart."""

    def generation_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """How to sample, checked."""
        return self.sampling_params(self._max_tokens(), self._num_logprobs(), defaults)

    def _max_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens"
                f" ({self.max_completion_tokens}) differ; give one of them",
                "max_completion_tokens",
            )
        check_range("max_completion_tokens", self.max_completion_tokens, 1, MAX_TOKEN_ID)
        return self.max_completion_tokens

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is not None:
            check_range("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
            if self.top_logprobs and not self.logprobs:
                raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise InvalidRequestError("logprob_token_ids needs logprobs: true", "logprob_token_ids")
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
