"""`text` of a response: how the answer is to look. In chat it is called `response_format`, and a
schema is a layer deeper there."""

from dataclasses import dataclass
from typing import Any

import msgspec

from api.body import decode_field
from engine.errors import InvalidRequestError, UnsupportedFieldError

MAX_TEXT_BYTES = 1 << 20

_NULL = msgspec.Raw(b"null")
_PLAIN = msgspec.Raw(b'{"type":"text"}')


class _Text(msgspec.Struct):
    format: msgspec.Raw = _NULL
    verbosity: str | None = None


class _Format(msgspec.Struct):
    type: str


_TEXT = msgspec.json.Decoder(_Text | None).decode
_FORMAT = msgspec.json.Decoder(_Format).decode


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How the answer is to look."""

    shown: Any
    """The field as the response repeats it."""


def read(raw: msgspec.Raw) -> TextFormat:
    """The field, checked.

    Raises:
        InvalidRequestError: it is malformed or too long.
        UnsupportedFieldError: it asks for what this server does not do.
    """
    if len(raw) > MAX_TEXT_BYTES:
        raise InvalidRequestError(f"text is over {MAX_TEXT_BYTES} bytes long", "text")
    text = decode_field(_TEXT, raw, "text") or _Text()
    if text.verbosity not in (None, "medium"):
        raise UnsupportedFieldError(
            "text.verbosity is not supported by this server: say in instructions how much is to be"
            " said",
            "text.verbosity",
        )
    form = _PLAIN if text.format == _NULL else text.format
    kind = decode_field(_FORMAT, form, "text.format").type
    match kind:
        case "text":
            pass
        case "json_object" | "json_schema":
            raise UnsupportedFieldError(
                f"text.format: {kind} needs output that is bound to a grammar, which this server"
                " does not do yet",
                "text.format",
            )
        case _:
            raise InvalidRequestError(
                f"text.format.type must be text, json_object or json_schema, not {kind[:40]!r}",
                "text.format.type",
            )
    shown: dict[str, Any] = {"format": msgspec.Raw(bytes(form))}
    if text.verbosity is not None:
        shown["verbosity"] = text.verbosity
    return TextFormat(shown)
