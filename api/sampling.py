"""Sampling parameters as a user gives them: the engine's, and what only concerns text.

Used by the `LLM` class and by the HTTP routes. Stop strings, special tokens and the number of
choices never reach the engine: `for_engine` leaves them out.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from api.limits import MAX_BAD_WORD_CHARS, MAX_SEQUENCES, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from api.structured import options
from api.structured.options import StructuredOutputsParams
from engine.errors import InvalidRequestError
from engine.limits import MAX_BAD_WORDS
from engine.sampling_params import RepetitionDetection, check_range
from engine.sampling_params import SamplingParams as EngineSamplingParams
from engine.structured_output import StructuredOutput


class SamplingParams(EngineSamplingParams, frozen=True, kw_only=True, gc=False):
    """How to continue a prompt. All fields are keywords, with vLLM's names and defaults.

    Lists may be given for tuples, and a single string for `stop`.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of bounds; `param` names it.
    """

    max_tokens: int | None = 16
    """Output tokens at most. None: as many as the model's length leaves after the prompt."""

    n: int = 1
    """Independent continuations of each prompt."""

    stop: tuple[str, ...] = ()
    """Generation ends where one of these strings appears."""

    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the text."""

    skip_special_tokens: bool = True
    """Leave out the text of special tokens."""

    spaces_between_special_tokens: bool = True
    """Only with `skip_special_tokens` off, and only for tokenizers that join tokens by spaces
    (WordPiece and the like): False joins neighbouring special tokens without one."""

    bad_words: tuple[str, ...] = ()
    """Words that the output must not hold, at its start or behind a space."""

    structured_outputs: StructuredOutputsParams | None = None
    """What the output must look like."""

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            self._read_structured_outputs(self.structured_outputs)
        if isinstance(self.stop, str):
            _replace(self, "stop", (self.stop,))
        for value, (name, default, is_right, kind) in zip(_checked(self), _CHECKS, strict=True):
            if value is default:  # as are most
                continue
            if name in _TUPLES and isinstance(value, list | set | frozenset):
                value = tuple(value)
                _replace(self, name, value)
            if value is None and name in _TUPLES_BY_DEFAULT:
                _replace(self, name, ())
            elif not is_right(value):
                raise InvalidRequestError(f"{name} must be {kind}, not {value!r:.80}", name)
        super().__post_init__()
        check_range("n", self.n, 1, MAX_SEQUENCES)
        if self.stop:
            check_stop(self.stop)
        if self.bad_words:
            _check_bad_words(self.bad_words)

    def _read_structured_outputs(self, given: object) -> None:
        if not isinstance(given, StructuredOutputsParams):
            raise InvalidRequestError(
                f"structured_outputs must be a StructuredOutputsParams, not {given!r:.80}",
                "structured_outputs",
            )
        _replace(self, "structured_output", options.output(given))

    def bound_by(self, output: StructuredOutput) -> "SamplingParams":
        """The same, for an output of that form."""
        return msgspec.structs.replace(self, structured_output=output)

    def for_engine(self, choice: int = 0) -> EngineSamplingParams:
        """What the engine needs to generate continuation number `choice`.

        Continuations of one prompt draw from seeds that follow each other, or they would be equal.
        """
        params = EngineSamplingParams(*_engine_fields(self))
        if self.seed is not None and choice:
            params = msgspec.structs.replace(params, seed=_wrap_seed(self.seed + choice))
        return params


_engine_fields = attrgetter(*EngineSamplingParams.__struct_fields__)


def _wrap_seed(seed: int) -> int:
    """Bring a sum back into the 64 bits of a seed."""
    return (seed + 2**63) % 2**64 - 2**63


def _replace(params: SamplingParams, name: str, value: object) -> None:
    # Frozen for its users; while it is being built, values still take their final form.
    msgspec.structs.force_setattr(params, name, value)


def check_stop(stop: Sequence[str], name: str = "stop") -> None:
    """Refuse stop strings that are too many, too long or empty, of a request or of a program.

    Args:
        stop: the strings.
        name: what the client calls them.

    Raises:
        InvalidRequestError: with the limit and the offending number.
    """
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"{name} takes at most {MAX_STOP_STRINGS} strings, not {len(stop)}", name
        )
    for string in stop:
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"a string of {name} has 1 to {MAX_STOP_STRING_CHARS} characters, not"
                f" {len(string)}",
                name,
            )


def _check_bad_words(words: Sequence[str]) -> None:
    """Refuse words that are too many, too long or empty, before tokens are made of them."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words takes at most {MAX_BAD_WORDS} words, not {len(words)}", "bad_words"
        )
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"a bad word has 1 to {MAX_BAD_WORD_CHARS} characters, not {len(word)}", "bad_words"
            )


# msgspec checks types when it decodes, not when a struct is built by hand, which is what users of
# the `LLM` class do. `True` is an int to Python, but never what a user means by a number.


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _all(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(is_right, value))


def _optional(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(map(_is_int, value))
        and all(map(_is_number, value.values()))
    )


def _kinds(
    names: Iterable[str], is_right: Callable[[Any], bool], kind: str
) -> dict[str, tuple[Callable[[Any], bool], str]]:
    return dict.fromkeys(names, (is_right, kind))


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_BOOLS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_TUPLES_BY_DEFAULT = (
    *("stop", "stop_token_ids", "eos_token_ids"),
    *("bad_words", "bad_words_token_ids", "logprob_token_ids"),
)
_TUPLES = (*_TUPLES_BY_DEFAULT, "allowed_token_ids")

_KINDS: Final = {
    **_kinds(_NUMBERS, _is_number, "a number"),
    **_kinds(("top_k", "min_tokens", "n"), _is_int, "an integer"),
    **_kinds(
        ("seed", "max_tokens", "logprobs", "prompt_logprobs"), _optional(_is_int), "an integer"
    ),
    **_kinds(_BOOLS, _is_bool, "true or false"),
    **_kinds(
        ("stop_token_ids", "eos_token_ids", "logprob_token_ids"),
        _all(_is_int),
        "a list of token ids",
    ),
    **_kinds(("bad_words_token_ids",), _all(_all(_is_int)), "a list of tuples of token ids"),
    **_kinds(("bad_words",), _all(_is_str), "a list of strings"),
    **_kinds(("allowed_token_ids",), _optional(_all(_is_int)), "a list of token ids"),
    **_kinds(("stop",), _all(_is_str), "a string or a list of strings"),
    **_kinds(("logit_bias",), _optional(_is_bias), "a map from token ids to numbers"),
    **_kinds(
        ("repetition_detection",),
        _optional(lambda value: isinstance(value, RepetitionDetection)),
        "a RepetitionDetection",
    ),
}

_DEFAULTS = dict(
    zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
)
_CHECKS = tuple((name, _DEFAULTS[name], *check) for name, check in _KINDS.items())
_checked = attrgetter(*_KINDS)
