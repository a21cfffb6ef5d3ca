"""JSON schemas of clients: checked, bounded, and made ready to be compiled. Pure.

What is refused here is broken, would take for ever, or has no instance that ends; the error names
the place. What the compiler does not know is for the compiler to refuse, or to leave out.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from api.body import decode_field
from api.limits import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from api.structured.keywords import LISTS, MAPS, SINGLE, Schema
from api.structured.schema_graph import SchemaGraph
from engine.errors import InvalidRequestError

_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    }
)
"""Those that can be enforced. Others are annotations, as the specification has it by default."""

_WHITESPACE = r"\r?\n[ \t]{0,80}|[ \t]{1,8}"
"""Between the parts of JSON: a line break with its indentation, or some spaces. There are models
that write white space without end where they may."""

_DECODE = msgspec.json.Decoder(dict[str, Any] | bool).decode


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written, and how much of a schema must hold."""

    is_strict: bool = True
    """What cannot be enforced is refused; else it is left out."""

    is_compact: bool = False
    """No white space between the parts."""

    whitespace: str | None = None
    """A regular expression for the white space between the parts."""

    is_closed: bool = False
    """Objects have no properties but those of their schema, also where several describe one."""

    escapes: str | None = None
    """What may follow a backslash in a string; None: all that JSON has, but for the slash."""

    def options(self) -> dict[str, object]:
        """What the compiler reads of it."""
        options: dict[str, object] = {"lenient": not self.is_strict}
        if self.is_compact:
            options |= {"whitespace_flexible": False, "whitespace_pattern": None}
        else:
            options["whitespace_pattern"] = self.whitespace or _WHITESPACE
        if self.escapes is not None:
            options["json_allowed_escapes"] = self.escapes
        return options


def read(raw: bytes | msgspec.Raw, place: str, style: JsonStyle) -> Schema:
    """A schema, ready for the compiler.

    Args:
        raw: an object, `true` or `false`.
        place: its name in the request.
        style: of the JSON.

    Raises:
        InvalidRequestError: it is no schema, too much of one, or nothing is valid under it.
    """
    if len(raw) > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(f"{place} is over {MAX_SCHEMA_BYTES} bytes long", place)
    check_depth(bytes(raw), place)
    return with_style(checked(decode_field(_DECODE, raw, place), place, style), style)


def checked(schema: Schema | bool, place: str, style: JsonStyle) -> Schema:
    """The same of a schema that is decoded and neither too long nor too deep, without the style."""
    graph = SchemaGraph(schema, place)
    if not graph.can_end():
        raise InvalidRequestError(
            f"{place}: nothing is valid under this schema, or nothing that ends", place
        )
    rewritten: Schema = _rewritten(schema, style.is_closed or not graph.is_combined)
    return rewritten if isinstance(rewritten, dict) else {}


def with_style(schema: Schema, style: JsonStyle) -> Schema:
    """A schema that has passed, with the compiler's options in it."""
    return {**schema, "x-guidance": style.options()}


def check_depth(raw: bytes, place: str) -> None:
    """Bound the brackets in brackets of a JSON text, before a decoder is let loose on it."""
    if raw.count(b"{") + raw.count(b"[") <= MAX_SCHEMA_DEPTH:
        return
    depth = 0
    is_text = is_escape = False
    for byte in raw:
        if is_text:
            is_text = is_escape or byte != 0x22
            is_escape = byte == 0x5C and not is_escape
        elif byte == 0x22:
            is_text = True
        elif byte in b"{[":
            depth += 1
            if depth > MAX_SCHEMA_DEPTH:
                raise InvalidRequestError(f"{place} is nested over {MAX_SCHEMA_DEPTH} deep", place)
        elif byte in b"}]":
            depth -= 1


def _rewritten(schema: Any, is_closed: bool) -> Any:
    """A copy without formats that nothing enforces. With `is_closed`, objects whose schemas name
    properties, and say nothing of others, have no others."""
    if not isinstance(schema, dict):
        return schema
    copy = {key: _rewritten_value(key, value, is_closed) for key, value in schema.items()}
    copy.pop("x-guidance", None)  # the compiler's, and ours to set
    if copy.get("format", "unknown") not in _FORMATS:
        del copy["format"]
    if copy.get("uniqueItems") is False:
        del copy["uniqueItems"]
    names_properties = "properties" in copy or "patternProperties" in copy
    if is_closed and names_properties and "unevaluatedProperties" not in copy:
        copy.setdefault("additionalProperties", False)
    return copy


def _rewritten_value(key: str, value: Any, is_closed: bool) -> Any:
    if key in MAPS:
        return {name: _rewritten(child, is_closed) for name, child in value.items()}
    if key in LISTS or (key in SINGLE and isinstance(value, list)):
        return [_rewritten(child, is_closed) for child in value]
    return _rewritten(value, is_closed) if key in SINGLE else value
