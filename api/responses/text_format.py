"""`text` of a response: how the answer is to look. In chat it is called `response_format`, and a
schema is a layer deeper there."""

from dataclasses import dataclass
from typing import Any

import msgspec

from api.body import decode_field
from api.limits import MAX_TEXT_FIELD_BYTES
from api.structured import fields
from api.structured.fields import Wanted
from engine.errors import InvalidRequestError, UnsupportedFieldError

_NULL = msgspec.Raw(b"null")
_PLAIN = msgspec.Raw(b'{"type":"text"}')


class _Text(msgspec.Struct):
    format: msgspec.Raw = _NULL
    verbosity: str | None = None


class _Format(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = _NULL
    strict: bool | None = None


_TEXT = msgspec.json.Decoder(_Text | None).decode
_FORMAT = msgspec.json.Decoder(_Format).decode


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How the answer is to look."""

    shown: Any
    """The field as the response repeats it."""

    form: _Format

    def read_wanted(self) -> Wanted | None:
        """What the answer must look like. Takes milliseconds for long schemas.

        Raises:
            InvalidRequestError: the schema is broken or too large.
        """
        match self.form.type:
            case "json_object":
                return fields.any_object("text.format")
            case "json_schema":
                is_strict = self.form.strict is not False  # by default, says OpenAI's reference
                return fields.under_schema(self.form.schema, "text.format", is_strict=is_strict)
            case _:
                return None


def read(raw: msgspec.Raw) -> TextFormat:
    """The field, checked.

    Raises:
        InvalidRequestError: it is malformed or too long.
        UnsupportedFieldError: it asks for what this server does not do.
    """
    if len(raw) > MAX_TEXT_FIELD_BYTES:
        raise InvalidRequestError(f"text is over {MAX_TEXT_FIELD_BYTES} bytes long", "text")
    text = decode_field(_TEXT, raw, "text") or _Text()
    if text.verbosity not in (None, "medium"):
        raise UnsupportedFieldError(
            "text.verbosity is not supported by this server: say in instructions how much is to be"
            " said",
            "text.verbosity",
        )
    form = _PLAIN if text.format == _NULL else text.format
    found = decode_field(_FORMAT, form, "text.format")
    match found.type:
        case "text" | "json_object":
            pass
        case "json_schema":
            if not found.name:
                raise InvalidRequestError("text.format.name is required", "text.format.name")
        case kind:
            raise InvalidRequestError(
                f"text.format.type must be text, json_object or json_schema, not {kind[:40]!r}",
                "text.format.type",
            )
    shown: dict[str, Any] = {"format": msgspec.Raw(bytes(form))}
    if text.verbosity is not None:
        shown["verbosity"] = text.verbosity
    return TextFormat(shown, found)
