"""Values in a family's own notation, by a JSON schema. Pure; used by families that write no JSON.

Numbers are bound exactly, and so are texts where the notation has JSON's own. Of lists and objects
the types of members, the names and their order are bound; how many members there are is not, but
that a list is not empty.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from api.structured.keywords import Schema, resolve, types
from api.structured.lark import Grammar, literal, one_of
from api.structured.schema import JsonStyle, with_style
from engine.errors import InvalidRequestError

_ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")
_INTEGER = r"/-?(0|[1-9][0-9]{0,18})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/"
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXT_KEYWORDS = ("minLength", "maxLength", "pattern", "format")

WriteKey = Callable[[str], str | None]
"""The expression for the name of a member, with what stands between it and the value; None: the
notation cannot write the name."""


class Notation(Protocol):
    """How one family writes values."""

    @property
    def constants(self) -> Mapping[object, str]:
        """What true, false and null are called."""

    @property
    def separator(self) -> str:
        """Between the members of a list or an object."""

    def text(self, writer: "ValueWriter", schema: Schema) -> str:
        """An expression for texts."""

    def one_text(self, writer: "ValueWriter", text: str) -> str | None:
        """An expression for one text; None: it cannot be written."""

    def key(self, name: str) -> str | None:
        """As `WriteKey`, in objects."""

    def any_key(self, writer: "ValueWriter") -> str:
        """The same for any name."""


class ValueWriter:
    """Writes the values of one schema.

    Args:
        grammar: takes the rules.
        notation: of the family.
        root: the schema, to which references refer.
        style: of what is written as JSON.
    """

    def __init__(
        self, grammar: Grammar, notation: Notation, root: Schema, style: JsonStyle
    ) -> None:
        self.grammar = grammar
        self._notation = notation
        self._root = root
        self._style = style
        self._rules: dict[int, str] = {}
        self._kept: list[Schema] = []
        """Those that rules were written for: identities are theirs only while they live."""
        self._anything = ""

    def value(self, schema: Schema | bool) -> str:
        """An expression for what is valid under a schema."""
        if isinstance(schema, bool) or not schema:
            return self._any_value()
        if id(schema) not in self._rules:
            self._kept.append(schema)
            self._rules[id(schema)] = name = self.grammar.later()
            self.grammar.define(name, self._value(schema))
        return self._rules[id(schema)]

    def members(
        self, schema: Schema, write_key: WriteKey | None = None, any_key: str | None = None
    ) -> str:
        """An expression for what stands between the brackets of an object.

        Args:
            schema: of the object.
            write_key: None: as in all objects.
            any_key: the same for any name.

        Raises:
            InvalidRequestError: there must be a member whose name cannot be written.
        """
        schema = self._merged(schema)
        if not schema.get("properties"):
            if schema.get("additionalProperties") is False or "properties" in schema:
                return ""
            more = schema.get("additionalProperties", True)
            key = any_key or self._notation.any_key(self)
            return self._listed(self.grammar.rule(f"{key} {self.value(more)}"), is_empty_right=True)
        write_key = write_key or self._notation.key
        required = schema.get("required", ())
        members: list[tuple[str, bool]] = []
        for name, child in schema["properties"].items():
            key_expression = write_key(name)
            if key_expression is not None:
                members.append((f"{key_expression} {self.value(child)}", name in required))
            elif name in required:
                raise InvalidRequestError(
                    f"tools: this model's notation cannot write a parameter called {name[:80]!r}",
                    "tools",
                )
        return _ordered(self.grammar, members, literal(self._notation.separator))

    def _value(self, schema: Schema) -> str:
        if "const" in schema or "enum" in schema:
            return self._one_of_constants(schema)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return one_of(map(self.value, schema[key]))
        if "$ref" in schema:
            return self.value(resolve(self._root, schema["$ref"]))
        if "allOf" in schema:
            return self.value(self._merged(schema))
        kinds = types(schema) or _implied(schema)
        return one_of(self._of_type(schema, kind) for kind in kinds)

    def _of_type(self, schema: Schema, kind: str) -> str:
        match kind:
            case "string":
                return self._notation.text(self, schema)
            case "integer" | "number":
                return self._number(schema, kind)
            case "boolean":
                names = self._notation.constants
                return one_of(literal(names[value]) for value in (True, False))
            case "null":
                return literal(self._notation.constants[None])
            case "array":
                return self._array(schema)
            case _:
                return f"{literal('{')} {self.members(schema)} {literal('}')}"

    def json_text(self, schema: Schema) -> str | None:
        """Texts as JSON has them; None where the schema does not ask for anything."""
        kept = {key: schema[key] for key in _TEXT_KEYWORDS if key in schema}
        if not kept:
            return None
        return self.grammar.json(with_style({"type": "string", **kept}, self._style))

    def _number(self, schema: Schema, kind: str) -> str:
        kept = {key: schema[key] for key in _NUMBER_KEYWORDS if key in schema}
        if not kept:
            return self.grammar.terminal(_INTEGER if kind == "integer" else _NUMBER)
        return self.grammar.json(with_style({"type": kind, **kept}, self._style))

    def _array(self, schema: Schema) -> str:
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        if first:
            separator = f" {literal(self._notation.separator)} "
            body = separator.join(map(self.value, first))
        else:
            is_empty_right = not schema.get("minItems")
            body = self._listed(self.value(items), is_empty_right=is_empty_right)
        return f"{literal('[')} {body} {literal(']')}"

    def _listed(self, item: str, *, is_empty_right: bool) -> str:
        listed = f"{item} ({literal(self._notation.separator)} {item})*"
        return f"({listed})?" if is_empty_right else listed

    def _one_of_constants(self, schema: Schema) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        written = [each for each in map(self._constant, values) if each is not None]
        if not written:
            raise InvalidRequestError(
                "tools: this model's notation can write none of the values of an enum", "tools"
            )
        return one_of(written)

    def _constant(self, value: Any) -> str | None:
        match value:
            case str():
                return self._notation.one_text(self, value)
            case bool() | None:
                return literal(self._notation.constants[value])
            case int() | float():
                return literal(json.dumps(value))
            case _:
                return None

    def _any_value(self) -> str:
        if not self._anything:
            self._anything = self.grammar.later()
            kinds = one_of(self._of_type({}, kind) for kind in _ALL_TYPES)
            self.grammar.define(self._anything, kinds)
        return self._anything

    def _merged(self, schema: Schema) -> Schema:
        """A schema with those of its references and of `allOf` put into it."""
        parts = [resolve(self._root, schema["$ref"])] if "$ref" in schema else []
        parts += schema.get("allOf", [])
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        if not parts or len(self._kept) > _MAX_MERGED:
            return own
        whole: dict[str, Any] = {}
        for part in [*map(self._merged, (part for part in parts if isinstance(part, dict))), own]:
            properties = {**whole.get("properties", {}), **part.get("properties", {})}
            required = [*whole.get("required", ()), *part.get("required", ())]
            whole |= part
            if properties or "properties" in whole:
                whole["properties"] = properties
            whole["required"] = required
        return whole


_MAX_MERGED = 1000


def _implied(schema: Schema) -> Sequence[str]:
    """The types of a schema that names none."""
    if "properties" in schema:
        return ("object",)
    return ("array",) if "items" in schema or "prefixItems" in schema else _ALL_TYPES


def _ordered(grammar: Grammar, members: Sequence[tuple[str, bool]], separator: str) -> str:
    """Members in their order, each with whether it must be there."""
    beginnings: list[str] = []
    rest = ""
    for i, (expression, is_required) in reversed(list(enumerate(members))):
        member = grammar.rule(expression)
        if not any(each for _, each in members[:i]):
            beginnings.append(f"{member} {rest}")
        follower = f"{separator} {member}"
        rest = grammar.rule(f"{follower if is_required else f'({follower})?'} {rest}".strip())
    is_empty_right = not any(is_required for _, is_required in members)
    return f"({one_of(reversed(beginnings))})" + "?" * is_empty_right if members else ""
