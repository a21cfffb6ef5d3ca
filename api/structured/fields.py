"""`response_format`, `structured_outputs` and the older `guided_*` of a request. Pure.

A request says it once: two of them that ask for something exclude each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from api.body import decode_field, unknown_names
from api.limits import MAX_FORM_BYTES
from api.structured import options, structural_tag
from api.structured.options import StructuredFields
from api.structured.schema import JsonStyle, check_depth
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput

NULL = msgspec.Raw(b"null")

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""What vLLM called the fields of `structured_outputs` before there was one."""

RESPONSE_FORMAT = "response_format"
STRUCTURED_OUTPUTS = "structured_outputs"
NAMES = (RESPONSE_FORMAT, STRUCTURED_OUTPUTS, *GUIDED)
"""The fields of a request that are read here."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an output must look like, and the field that says so."""

    output: StructuredOutput
    field: str
    """For errors that only the engine finds."""

    yields_to_calls: bool = False
    """Where calls must be made, and so there is no content, it asks for nothing."""


class _JsonSchema(msgspec.Struct):
    name: str
    description: str | None = None
    schema: msgspec.Raw = NULL
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None


class _StructuredOutputs(msgspec.Struct):
    """As `StructuredOutputsParams`; the schema is not looked at yet."""

    json: msgspec.Raw = NULL
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = NULL
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


NESTED = {
    RESPONSE_FORMAT: frozenset({*_ResponseFormat.__struct_fields__, *structural_tag.NAMES}),
    f"{RESPONSE_FORMAT}.json_schema": frozenset(_JsonSchema.__struct_fields__),
    STRUCTURED_OUTPUTS: frozenset(_StructuredOutputs.__struct_fields__),
}
"""What these fields may hold, by their path."""

_RESPONSE_FORMAT = msgspec.json.Decoder(_ResponseFormat).decode
_NOTHING = _StructuredOutputs()
_STRUCTURED = msgspec.json.Decoder(_StructuredOutputs).decode
_TEXT = msgspec.json.Decoder(str).decode
_TEXTS = msgspec.json.Decoder(list[str]).decode


def read(given: Mapping[str, msgspec.Raw]) -> Wanted | None:
    """What a request wants its output to look like.

    Args:
        given: the fields of this module that the request has, by name, and none that is null.

    Raises:
        InvalidRequestError: a field is malformed, or two of them ask for something.
    """
    asked = dict(given)
    form = _read_response_format(asked.pop(RESPONSE_FORMAT, NULL))
    _check_one([RESPONSE_FORMAT] * (form is not None) + list(asked))
    if form is not None:
        output = _of_response_format(form, given[RESPONSE_FORMAT])
        return Wanted(output, RESPONSE_FORMAT, yields_to_calls=True)
    if not asked:
        return None
    if STRUCTURED_OUTPUTS in asked:
        return Wanted(_of_structured(asked[STRUCTURED_OUTPUTS]), STRUCTURED_OUTPUTS)
    return Wanted(_of_guided(asked), next(iter(asked)))


def any_object(place: str) -> Wanted:
    """Any JSON object, as an answer's format."""
    style = JsonStyle(is_strict=False)
    return Wanted(options.of_schema(b'{"type":"object"}', place, style), place, True)


def under_schema(raw: msgspec.Raw, place: str, *, is_strict: bool) -> Wanted:
    """JSON under a schema, as an answer's format.

    Args:
        raw: the schema.
        place: of the format in the request; the schema is its field `schema`.
        is_strict: refuse what cannot be enforced.
    """
    if raw == NULL:
        raise InvalidRequestError(f"{place}.schema is required", f"{place}.schema")
    style = JsonStyle(is_strict=is_strict)
    return Wanted(options.of_schema(raw, f"{place}.schema", style), place, True)


def _read_response_format(raw: msgspec.Raw) -> _ResponseFormat | None:
    """None where it asks for nothing."""
    if raw == NULL:
        return None
    _check_size(raw, RESPONSE_FORMAT)
    form = decode_field(_RESPONSE_FORMAT, raw, RESPONSE_FORMAT)
    return None if form.type == "text" else form


def _check_one(names: list[str]) -> None:
    kinds = [name for name in names if name != "guided_whitespace_pattern"]
    if names and not kinds:
        raise InvalidRequestError("guided_whitespace_pattern needs guided_json", names[0])
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"{kinds[0]} and {kinds[1]} both say what the output must look like: give one", kinds[1]
        )


def _check_size(raw: msgspec.Raw, place: str) -> None:
    if len(raw) > MAX_FORM_BYTES:
        raise InvalidRequestError(f"{place} is over {MAX_FORM_BYTES} bytes long", place)
    check_depth(bytes(raw), place)


def _of_response_format(form: _ResponseFormat, raw: msgspec.Raw) -> StructuredOutput:
    match form.type:
        case "json_object":
            return any_object(RESPONSE_FORMAT).output
        case "json_schema":
            place = f"{RESPONSE_FORMAT}.json_schema"
            if form.json_schema is None:
                raise InvalidRequestError(f"{place} must hold a name and a schema", place)
            wish = form.json_schema
            return under_schema(wish.schema, place, is_strict=bool(wish.strict)).output
        case "structural_tag":
            return structural_tag.read(raw, RESPONSE_FORMAT, JsonStyle())
        case _:
            place = f"{RESPONSE_FORMAT}.type"
            raise InvalidRequestError(
                f"{place} must be text, json_object, json_schema or structural_tag, not"
                f" {form.type[:40]!r}",
                place,
            )


def _of_guided(asked: Mapping[str, msgspec.Raw]) -> StructuredOutput:
    """The older names: each is a field of its own."""
    for name, raw in asked.items():
        _check_size(raw, name)
    values = {
        GUIDED[name]: _text_of(raw, name)
        if name == "guided_json"
        else decode_field(_TEXTS if name == "guided_choice" else _TEXT, raw, name)
        for name, raw in asked.items()
    }
    names = {new: old for old, new in GUIDED.items()}
    return options.output(msgspec.convert(values, StructuredFields), next(iter(asked)), names)


def _of_structured(raw: msgspec.Raw) -> StructuredOutput:
    place = STRUCTURED_OUTPUTS
    _check_size(raw, place)
    found = decode_field(_STRUCTURED, raw, place)
    if found == _NOTHING and (unknown := unknown_names(raw, NESTED[place])):
        raise InvalidRequestError(
            f"{place} has no {unknown[0][:40]!r}: give exactly one of {', '.join(options.KINDS)}",
            place,
        )
    return options.output(
        StructuredFields(
            json=_text_of(found.json, f"{place}.json"),
            regex=found.regex,
            choice=found.choice,
            grammar=found.grammar,
            json_object=found.json_object,
            structural_tag=_text_of(found.structural_tag, f"{place}.structural_tag"),
            disable_any_whitespace=bool(found.disable_any_whitespace),
            disable_additional_properties=bool(found.disable_additional_properties),
            whitespace_pattern=found.whitespace_pattern,
        ),
        place,
    )


def _text_of(raw: msgspec.Raw, place: str) -> str | None:
    """JSON that a field holds, as a text or in full."""
    if raw == NULL:
        return None
    given = bytes(raw)
    return decode_field(_TEXT, raw, place) if given.startswith(b'"') else given.decode()
