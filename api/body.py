"""Request bodies: bytes into `protocol` structs. `body_reader` has taken them off the connection.

Decoding is strict: a bool is no number, NaN is no JSON, a string is no list. Each violation is an
InvalidRequestError whose `param` is the field as the client wrote it. A field that OpenAI or vLLM
have and we do not serve is refused by name; one that nobody knows is ignored and reported.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from api.limits import MAX_OTHER_BYTES
from engine.errors import InvalidRequestError, UnsupportedFieldError

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r" - at `(?:key` in `)?\$(\[\.\.\.\]|[^`]*)`$")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_REPORTED = 16
_MAX_SEARCHED_BYTES = 1 << 16
_MAX_NESTED_BYTES = 1 << 17
_NO_NESTED: Mapping[str, Collection[str]] = {}
_MAX_EMPTY_BYTES = 256
"""A value that asks for nothing is not longer."""


class Refusal(NamedTuple):
    """A field that is not served."""

    reason: str
    """Why, or what to do instead."""
    accepted: tuple[object, ...] = ()
    """Values that ask for nothing, besides null, false, 0 and what is empty."""


def decode(
    raw: bytes,
    decoder: msgspec.json.Decoder[T],
    known: Collection[str],
    unsupported: Mapping[str, Refusal],
    nested: Mapping[str, Collection[str]] = _NO_NESTED,
) -> tuple[T, list[str]]:
    """Decode a body.

    Args:
        raw: the body.
        decoder: of the struct.
        known: all fields that have a meaning or are accepted without one.
        unsupported: fields that are refused, unless their value asks for nothing.
        nested: of fields that hold an object, by their path: all that such an object may have.

    Returns:
        The struct, and the names of the fields that were ignored; of nested ones, their paths.
    """
    try:
        body = decoder.decode(raw)
        _check_other_fields(raw, body)
        fields = _RAW_FIELDS.decode(raw)
        ignored = [name for name in fields if name not in known]
        for name in ignored:
            if name in unsupported:
                _refuse_unless_empty(name, fields[name], unsupported[name])
        inside = [
            path
            for name in nested.keys() & fields.keys()
            for path in _unknown_inside(name, fields[name], nested)
        ]
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(raw, error) from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    return body, [name for name in ignored if name not in unsupported] + sorted(inside)


def unknown_names(raw: msgspec.Raw, known: Collection[str]) -> list[str]:
    """The names in an object that are not among `known`."""
    return [name for name in _RAW_FIELDS.decode(raw) if name not in known]


def decode_field(
    decode: Callable[[bytes | msgspec.Raw], V], raw: bytes | msgspec.Raw, place: str
) -> V:
    """Decode a field that was only skipped over so far.

    Args:
        decode: of a decoder.
        raw: the field.
        place: its name in the request.
    """
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        raise invalid_field(error, place) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{place} is no valid JSON: {error}", place) from error
    except RecursionError as error:
        raise InvalidRequestError(f"{place} is nested too deeply", place) from error


def invalid_field(error: msgspec.ValidationError, prefix: str = "") -> InvalidRequestError:
    """An error of msgspec as one of ours, with the field's name."""
    text = str(error)
    found = _PATH.search(text)
    if found is None:
        param = prefix
    else:
        text = text[: found.start()]
        param = f"{prefix}{found[1]}".removeprefix(".")
    message = text[:1].lower() + text[1:].replace(" | null", "").replace("`", "")
    subject = param or "the body"
    return InvalidRequestError(f"{subject}: {message}", param or None)


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that says which fields were ignored. Names are the client's: only harmless ones
    are repeated."""
    if not names:
        return {}
    shown = [name if _SAFE_NAME.fullmatch(name) else "?" for name in names[:_MAX_REPORTED]]
    return {"x-raywire-ignored": ",".join(shown)}


def _check_other_fields(raw: bytes, body: msgspec.Struct) -> None:
    """Bound what is not left raw in the struct, before objects are made of it."""
    if len(raw) <= MAX_OTHER_BYTES:
        return
    values = (getattr(body, name) for name in body.__struct_fields__)
    num_raw_bytes = sum(len(value) for value in values if isinstance(value, msgspec.Raw))
    if len(raw) - num_raw_bytes > MAX_OTHER_BYTES:
        raise InvalidRequestError(
            f"the body holds over {MAX_OTHER_BYTES} bytes besides prompt or messages"
        )


def _unknown_inside(
    path: str, raw: msgspec.Raw, nested: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Paths of all that nobody knows in one field. What is no object has none, and what is too
    long is refused for that later."""
    if len(raw) > _MAX_NESTED_BYTES or not bytes(raw).startswith(b"{"):
        return
    for name, value in _RAW_FIELDS.decode(raw).items():
        inner = f"{path}.{name}"
        if name not in nested[path]:
            yield inner
        elif inner in nested:
            yield from _unknown_inside(inner, value, nested)


def _refuse_unless_empty(name: str, raw: msgspec.Raw, refusal: Refusal) -> None:
    if len(raw) <= _MAX_EMPTY_BYTES:
        value = msgspec.json.decode(raw, type=object)
        if value in (None, False, "", [], {}) or value in refusal.accepted:
            return
    raise UnsupportedFieldError(f"{name} is not supported by this server: {refusal.reason}", name)


def _not_json(raw: bytes, error: Exception) -> InvalidRequestError:
    """Not JSON. NaN and Infinity deserve better than a byte offset: Python writes them."""
    name = _non_finite_field(raw)
    if name is not None:
        return InvalidRequestError(f"{name}: NaN and Infinity are no JSON numbers", name)
    return InvalidRequestError(f"the body is no valid JSON: {str(error)[:200]}")


class _NonFinite:
    """Stands for NaN, Infinity and -Infinity."""


def _non_finite_field(raw: bytes) -> str | None:
    if len(raw) > _MAX_SEARCHED_BYTES:
        return None
    try:
        body = json.loads(raw, parse_constant=lambda _: _NonFinite())
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return next((name for name, value in body.items() if _has_non_finite(value)), None)


def _has_non_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_non_finite, value.values()))
    if isinstance(value, list):
        return any(map(_has_non_finite, value))
    return isinstance(value, _NonFinite)
