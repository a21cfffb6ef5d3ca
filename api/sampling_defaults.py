"""How requests are sampled that do not say: what the makers of a model recommend in its
generation_config.json, and what an operator says (`--override-generation-config`).

Read once, at the start, by `process` and `LLM`; the routes and `input_processor` use what comes of
it. What it has of a value that nobody gives is nothing: the defaults of `SamplingParams` hold then.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine.errors import ConfigError, InvalidRequestError
from engine.sampling_params import BOUNDS, check_range

logger = logging.getLogger(__name__)

_FILE = "generation_config.json"

_NEUTRAL: Final[Mapping[str, float | None]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_new_tokens": None,
}
"""The names that are heeded, as in vLLM, with the values that change nothing."""

_INTEGERS = ("top_k", "max_new_tokens")
_LIMITS = {name: (least, most) for name, least, most in BOUNDS}
_LIMITS["max_new_tokens"] = _LIMITS["max_tokens"]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What stands in for fields that a request leaves out."""

    values: Mapping[str, float] = field(default_factory=dict)
    """By the names of `SamplingParams`; without those that change nothing."""

    max_tokens: int | None = None
    """Of requests that name no limit, but for completions, whose limit is OpenAI's 16."""

    most_tokens: int | None = None
    """More is cut, whatever a request asks for: an operator's limit."""

    def cap(self, max_tokens: int) -> int:
        """What a request gets that asks for so many tokens."""
        return max_tokens if self.most_tokens is None else min(max_tokens, self.most_tokens)

    def as_params(self) -> dict[str, float]:
        """As arguments of `SamplingParams`."""
        tokens = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**self.values, **tokens}


def read(
    folder: Path, source: str = "auto", override: Mapping[str, Any] | None = None
) -> SamplingDefaults:
    """Read the defaults of a model, and log what has been taken.

    Args:
        folder: of the model.
        source: "auto": its own file, if there is one; "vllm": no file; else a folder that has one,
            whose `max_new_tokens` is a limit.
        override: values that come before those of the file. Its `max_new_tokens` is a limit.

    Raises:
        ConfigError: a file cannot be read, or the one that was named is missing; or `override` is
            wrong. A wrong value of a file is left out, with a warning.
    """
    override = override or {}
    check_override(override)
    found = _of_file(folder, source)
    merged = {**found, **override}
    taken = {
        name: value
        for name, neutral in _NEUTRAL.items()
        if (value := merged.get(name)) is not None and value != neutral
    }
    max_tokens = taken.pop("max_new_tokens", None)
    is_limit = override.get("max_new_tokens") is not None or source not in ("auto", "vllm")
    defaults = SamplingDefaults(taken, max_tokens, max_tokens if is_limit else None)
    _log(defaults, has_file=bool(found), is_overridden=bool(override))
    return defaults


def check_override(values: Mapping[str, Any]) -> None:
    """Refuse what an operator cannot mean.

    Raises:
        ConfigError: an unknown name, or a value that is wrong.
    """
    for name, value in values.items():
        if name not in _NEUTRAL:
            raise ConfigError(
                f"--override-generation-config has {name[:40]!r}; there are {', '.join(_NEUTRAL)}"
            )
        if value is not None and (fault := _fault(name, value)):
            raise ConfigError(f"--override-generation-config: {fault}")


def _of_file(folder: Path, source: str) -> dict[str, Any]:
    """The values of the file that are to be heeded."""
    if source == "vllm":
        return {}
    file = (folder if source == "auto" else Path(source)) / _FILE
    if not file.is_file():
        if source == "auto":
            return {}
        raise ConfigError(f"--generation-config {source}: there is no {_FILE}")
    content = _read_object(file)
    given = {name: content[name] for name in _NEUTRAL if content.get(name) is not None}
    for name, value in [*given.items()]:
        if fault := _fault(name, value):
            logger.warning("%s: %s; left out", _FILE, fault)
            del given[name]
    return given


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return content


def _fault(name: str, value: Any) -> str | None:
    """What is wrong with a value; None if nothing is."""
    kinds = int if name in _INTEGERS else int | float
    if not isinstance(value, kinds) or isinstance(value, bool):
        kind = "an integer" if name in _INTEGERS else "a number"
        return f"{name} must be {kind}, not {value!r:.40}"
    if name == "top_p" and value == 0:
        return "top_p must be above 0 and at most 1, not 0"
    try:
        check_range(name, value, *_LIMITS[name])
    except InvalidRequestError as error:
        return error.message
    return None


def _log(defaults: SamplingDefaults, *, has_file: bool, is_overridden: bool) -> None:
    """Say that answers are not those of neutral sampling, which surprises."""
    if shown := defaults.as_params():
        names = (_FILE, has_file), ("--override-generation-config", is_overridden)
        logger.info(
            "requests that do not say how to sample get %s from=%s",
            " ".join(f"{name}={value}" for name, value in shown.items()),
            ",".join(name for name, is_used in names if is_used),
        )
