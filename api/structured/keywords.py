"""JSON Schema's keywords: where schemas are inside of schemas, and what each keyword may be. Pure.

Used by `schema` and by the families of `api.tools` that write no JSON.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from api.limits import MAX_COUNT, MAX_ENUM, MAX_PATTERN_BYTES, MAX_PROPERTIES
from engine.errors import InvalidRequestError

Schema = Mapping[str, Any]

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_STRINGS = ("$ref", "format", "pattern")


def children(schema: Schema) -> Iterator[tuple[str, Any]]:
    """All schemas in a schema, each with its place."""
    for key in (*SINGLE, *LISTS):
        child = schema.get(key)
        if isinstance(child, list):
            yield from ((f".{key}[{i}]", each) for i, each in enumerate(child))
        elif key in schema:
            yield f".{key}", child
    for key in MAPS:
        if key in schema:
            yield from ((f".{key}.{name[:64]}", child) for name, child in schema[key].items())


def resolve(root: Schema | bool, ref: str) -> Any:
    """What a reference points to.

    Raises:
        LookupError, TypeError, ValueError: nothing in this schema.
    """
    if ref != "#" and not ref.startswith("#/"):
        raise LookupError(ref)
    value: Any = root
    for step in ref.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def types(schema: Schema) -> Sequence[str] | None:
    """What instances may be; None: anything."""
    kind = schema.get("type")
    return [kind] if isinstance(kind, str) else kind


def alone(root: Schema, part: Schema) -> Schema:
    """A schema inside of another as a whole of its own: what it refers to comes with it."""
    if '"$ref"' not in json.dumps(part):
        return part
    return {**_moved(part), "$defs": {"_": _moved(root)}}


def _moved(value: Any) -> Any:
    """A schema whose references are right when it is `#/$defs/_`."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(each) for key, each in value.items()}
    if isinstance(ref := value.get("$ref"), str):
        moved["$ref"] = f"#/$defs/_{ref.removeprefix('#')}"
    return moved


def check(schema: Schema, place: str) -> None:
    """Look at the keywords of a schema, not at those inside of it.

    Raises:
        InvalidRequestError: one has a value that it cannot have, or that is too large.
    """
    for key, value in schema.items():
        at = f"{place}.{key[:64]}"
        if key in _COUNTS:
            _check_count(value, at)
        elif key in LISTS or key == "enum":
            _check_list(value, at, MAX_ENUM)
        elif key in MAPS:
            _check_map(value, at)
            for pattern in value if key == "patternProperties" else ():
                check_pattern(pattern, at)
        elif key in _STRINGS:
            _check_string(value, at, is_pattern=key == "pattern")
        elif key == "type":
            _check_type(value, at)
        elif key == "required":
            _check_required(value, at)


def check_pattern(pattern: str, place: str) -> None:
    """Bound a regular expression."""
    if len(pattern.encode("utf-8", "replace")) > MAX_PATTERN_BYTES:
        raise InvalidRequestError(
            f"{place}: a regular expression has at most {MAX_PATTERN_BYTES} bytes", place
        )


def shown(value: object) -> str:
    """A value in an error message."""
    return repr(value)[:60]


def _check_type(value: object, place: str) -> None:
    kinds = value if isinstance(value, list) and value else [value]
    if not all(isinstance(kind, str) and kind in TYPES for kind in kinds):
        raise InvalidRequestError(
            f"{place} must be one or several of {', '.join(sorted(TYPES))}, not {shown(value)}",
            place,
        )


def _check_required(value: object, place: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidRequestError(f"{place} must be a list of names of properties", place)
    _check_length(len(value), MAX_PROPERTIES, place)


def _check_list(value: object, place: str, most: int) -> None:
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(
            f"{place} must be a list that is not empty, not {shown(value)}", place
        )
    _check_length(len(value), most, place)


def _check_map(value: object, place: str) -> None:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{place} must be an object, not {shown(value)}", place)
    _check_length(len(value), MAX_PROPERTIES, place)


def _check_length(length: int, most: int, place: str) -> None:
    if length > most:
        raise InvalidRequestError(f"{place} has {length} members; {most} are the most", place)


def _check_string(value: object, place: str, *, is_pattern: bool) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place} must be a string, not {shown(value)}", place)
    if is_pattern:
        check_pattern(value, place)


def _check_count(value: object, place: str) -> None:
    # Some write 3.0; a bool is no number.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_COUNT or value % 1:  # type: ignore[operator]
        raise InvalidRequestError(
            f"{place} must be a whole number from 0 to {MAX_COUNT}, not {shown(value)}", place
        )
