"""How the next token is chosen. What crosses the wire: ids and numbers, no text.

Stop strings live in `api/`, which matches them. Bounds are checked at construction, and decoding
from the wire constructs, so a value that is out of bounds never gets as far as the sampler.
"""

from operator import attrgetter

import msgspec

from engine.errors import InvalidRequestError
from engine.limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_REPETITION_TOKENS,
    MAX_REPETITIONS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
    RANGES,
)
from engine.structured_output import StructuredOutput

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow."""


class RepetitionDetection(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False
):
    """End a request whose output repeats itself: one pattern of `min_pattern_size` to
    `max_pattern_size` tokens, `min_count` times in a row at the end of the output."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 4

    def __post_init__(self) -> None:
        name = "repetition_detection"
        check_range(f"{name}.max_pattern_size", self.max_pattern_size, 1, MAX_REPETITION_TOKENS)
        check_range(f"{name}.min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        check_range(f"{name}.min_count", self.min_count, 2, MAX_REPETITIONS)


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """End thoughts that grow too long: after `max_tokens` of one, only its end can come."""

    max_tokens: int
    start_token_ids: tuple[int, ...]
    """What opens a thought."""
    end_token_id: int
    """What ends it."""
    is_open: bool = False
    """The output begins inside a thought."""

    def __post_init__(self) -> None:
        name = "thinking_token_budget"
        check_range(name, self.max_tokens, 0, MAX_TOKEN_ID)
        _check_token_ids(name, (*self.start_token_ids, self.end_token_id), MAX_BAD_WORD_TOKENS)


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Sampling of one output sequence. Positions are protocol: new fields go last.

    Raises:
        InvalidRequestError: a value is out of bounds; `param` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""

    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    """Added to the logit of each token id, -100 to 100."""

    max_tokens: int | None = None
    """Output tokens at most. None: as many as the model's length leaves; the API server fills it
    in."""

    min_tokens: int = 0
    """Until that many are out, no end or stop token can be sampled."""

    stop_token_ids: tuple[int, ...] = ()
    """What the client asked for; honoured also with `ignore_eos`."""

    eos_token_ids: tuple[int, ...] = ()
    """The model's own end tokens, filled in by the API server."""

    ignore_eos: bool = False
    logprobs: int | None = None
    """Log probabilities of the sampled token and that many best ones; None for none at all."""

    prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""

    repetition_detection: RepetitionDetection | None = None

    allowed_token_ids: tuple[int, ...] | None = None
    """If given, no other token can be sampled."""

    structured_output: StructuredOutput | None = None
    """What the output must look like, as a whole."""

    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences that the output must not hold: the last token of each cannot be sampled where the
    output ends with the others."""

    logprob_token_ids: tuple[int, ...] = ()
    """If given, `logprobs` tells of these tokens, in this order, instead of the best ones."""

    thinking_budget: ThinkingBudget | None = None
    """How long thoughts may be, where the model's marks of them are known."""

    def __post_init__(self) -> None:
        for value, (name, least, most) in zip(_bounded(self), BOUNDS, strict=True):
            if value is not None and not least <= value <= most:
                check_range(name, value, least, most)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1, not 0", "top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)
        if self.stop_token_ids or self.eos_token_ids:
            _check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
            _check_token_ids("eos_token_ids", self.eos_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids must not be empty", "allowed_token_ids"
                )
            _check_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_LOGIT_BIAS)
        if self.bad_words_token_ids:
            _check_bad_words(self.bad_words_token_ids)
        if self.logprob_token_ids:
            _check_token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the request, once `min_tokens` are out."""
        eos = () if self.ignore_eos else self.eos_token_ids
        return (*eos, *self.stop_token_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have. `vocab_size` is the embedding's, not the
        tokenizer's."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids),
            ("thinking_token_budget", _end_of(self.thinking_budget)),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds token id {token_id}; this model's ids end at"
                        f" {vocab_size - 1}",
                        name,
                    )


BOUNDS = tuple((each.name, each.least, each.most) for each in RANGES if each.least is not None)
"""Name, least and most of each number that is given."""

_bounded = attrgetter(*(name for name, _, _ in BOUNDS))


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Raise InvalidRequestError unless `value` is a number from `least` to `most`."""
    # NaN fails a two-sided comparison; Python compares integers of any size with floats exactly.
    if not least <= value <= most:
        raise InvalidRequestError(
            f"{name} must be from {least} to {most}, not {str(value)[:40]}", name
        )


def _check_bias(bias: dict[int, float]) -> None:
    _check_token_ids("logit_bias", tuple(bias), MAX_LOGIT_BIAS)
    for value in bias.values():
        check_range("logit_bias", value, -MAX_BIAS, MAX_BIAS)


def _end_of(budget: ThinkingBudget | None) -> tuple[int, ...]:
    return () if budget is None else (budget.end_token_id,)


def _check_bad_words(sequences: tuple[tuple[int, ...], ...]) -> None:
    if len(sequences) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words are {len(sequences)} sequences of tokens; {MAX_BAD_WORDS} are the most",
            "bad_words",
        )
    for token_ids in sequences:
        if not token_ids:
            raise InvalidRequestError("bad_words must not be empty", "bad_words")
        _check_token_ids("bad_words", token_ids, MAX_BAD_WORD_TOKENS)


def _check_token_ids(name: str, token_ids: tuple[int, ...], most: int) -> None:
    if len(token_ids) > most:
        raise InvalidRequestError(
            f"{name} takes at most {most} token ids, not {len(token_ids)}", name
        )
    for token_id in token_ids:
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequestError(f"{name} holds {token_id}, which is no token id", name)
