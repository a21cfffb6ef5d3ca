"""vLLM's `StructuredOutputsParams`, as users of the library write it and as requests bring it."""

import json as json_text
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from api.limits import MAX_CHOICES, MAX_CHOICES_BYTES
from api.structured import ebnf, schema, structural_tag
from api.structured.keywords import check_pattern
from api.structured.lark import literal
from api.structured.schema import JsonStyle
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must look like, not checked yet: exactly one of the first six."""

    json: str | Mapping[str, Any] | None = None
    """JSON that is valid under this schema: an object, or its text."""

    regex: str | None = None
    """A text that this expression matches from its beginning to its end, in Rust's syntax."""

    choice: Sequence[str] | None = None
    """One of these texts."""

    grammar: str | None = None
    """Lark, or EBNF if it has a rule with `::=`, which then begins with `root`."""

    json_object: bool | None = None
    """Any JSON object."""

    structural_tag: str | None = None
    """Text with parts that are bound, as JSON in xgrammar's format."""

    disable_any_whitespace: bool = False
    """JSON without white space between its parts."""

    disable_additional_properties: bool = False
    """Objects have no properties but those that their schema names."""

    whitespace_pattern: str | None = None
    """White space between the parts of JSON, as a regular expression."""


class StructuredOutputsParams(StructuredFields, frozen=True, kw_only=True):
    """What the output must look like: exactly one of the first six fields. Names and meaning are
    vLLM's.

    Raises:
        InvalidRequestError: none is given, or several, or one that is broken or too large; `param`
            names it.
    """

    def __post_init__(self) -> None:
        output(self)


def output(
    params: StructuredFields,
    place: str = "structured_outputs",
    names: Mapping[str, str] | None = None,
) -> StructuredOutput:
    """The description that the engine takes.

    Args:
        params: what is asked for.
        place: where it stands in the request, for errors.
        names: of its fields there, where they are not the fields of `place`.
    """
    return _Reader(params, place, names or {}).read()


class _Reader:
    def __init__(self, params: StructuredFields, place: str, names: Mapping[str, str]) -> None:
        self._params = params
        self._place = place
        self._names = names

    def read(self) -> StructuredOutput:
        given = [kind for kind in KINDS if getattr(self._params, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequestError(
                f"{self._place}: give exactly one of {', '.join(KINDS)}, not {found}", self._place
            )
        self._check_types()
        return self._read_kind(given[0], self._at(given[0]))

    def _at(self, name: str) -> str:
        return self._names.get(name, f"{self._place}.{name}")

    def _check_types(self) -> None:
        """The library's users build it by hand: nothing has looked at types yet."""
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            self._check_type(name, (str, type(None)), "a string")
        self._check_type("json", (str, Mapping, type(None)), "a schema, or its text")
        self._check_type("choice", (list, tuple, type(None)), "a list of strings")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            self._check_type(name, (bool, type(None)), "true or false")

    def _check_type(self, name: str, kinds: tuple[type, ...], kind: str) -> None:
        if not isinstance(value := getattr(self._params, name), kinds):
            at = self._at(name)
            raise InvalidRequestError(f"{at} must be {kind}, not {value!r:.60}", at)

    def _read_kind(self, kind: str, place: str) -> StructuredOutput:
        params = self._params
        match kind:
            case "json":
                assert params.json is not None
                return self._of_schema(_raw(params.json), place)
            case "regex":
                assert params.regex is not None
                return of_regex(params.regex, place)
            case "choice":
                assert params.choice is not None
                return of_choice(params.choice, place)
            case "grammar":
                assert params.grammar is not None
                return StructuredOutput("lark", ebnf.read(params.grammar, place))
            case "json_object":
                if not params.json_object:
                    raise InvalidRequestError(f"{place} must be true where it is given", place)
                return self._of_schema(b'{"type":"object"}', place)
            case _:
                assert params.structural_tag is not None
                return structural_tag.read(_raw(params.structural_tag), place, self._style())

    def _of_schema(self, raw: bytes, place: str) -> StructuredOutput:
        return of_schema(raw, place, self._style())

    def _style(self) -> JsonStyle:
        pattern = self._params.whitespace_pattern
        if pattern is not None:
            check_pattern(pattern, self._at("whitespace_pattern"))
        return JsonStyle(
            is_compact=self._params.disable_any_whitespace,
            is_closed=self._params.disable_additional_properties,
            whitespace=pattern,
        )


def of_schema(raw: bytes | msgspec.Raw, place: str, style: JsonStyle) -> StructuredOutput:
    """JSON under a schema."""
    if not bytes(raw).strip():
        raise InvalidRequestError(f"{place} must not be empty", place)
    found = schema.read(raw, place, style)
    return StructuredOutput("json_schema", json_text.dumps(found, ensure_ascii=False))


def of_regex(expression: str, place: str) -> StructuredOutput:
    """A text that an expression matches."""
    if not expression.strip():
        raise InvalidRequestError(f"{place} must not be empty", place)
    check_pattern(expression, place)
    return StructuredOutput("regex", expression)


def of_choice(choices: Sequence[str], place: str) -> StructuredOutput:
    """One of some texts."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(f"{place} has 1 to {MAX_CHOICES} texts", place)
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            at = f"{place}[{i}]"
            raise InvalidRequestError(f"{at} must be a text that is not empty", at)
    text = f"[{','.join(map(literal, choices))}]"
    if len(text.encode("utf-8", "replace")) > MAX_CHOICES_BYTES:
        raise InvalidRequestError(f"{place} is over {MAX_CHOICES_BYTES} bytes long", place)
    return StructuredOutput("choice", text)


def _raw(value: str | Mapping[str, Any]) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    try:
        return json_text.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):  # of a program; requests are JSON
        raise InvalidRequestError("json: the schema holds what is no JSON", "json") from None
