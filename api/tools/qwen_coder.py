"""Qwen3-Coder and later Qwens: parameters between tags.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Nothing is quoted, so only the tool's schema tells the text 3 from the number.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast

from api.limits import MAX_TOOL_NAME_CHARS
from api.structured.keywords import Schema, alone, resolve
from api.structured.lark import Grammar, literal, one_of
from api.structured.schema import with_style
from api.tools.base import Sink, Tools
from api.tools.binding import Block, BoundTool
from api.tools.json_scan import escaped
from api.tools.reader import BrokenError, Reader, Steps, drop
from engine.errors import InvalidRequestError

START = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
MARKERS = (START, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
_STARTS = (START, FUNCTION)

_NAME = re.compile(r"[^<>\n]+")


def scan(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    while (found := (yield from reader.until(_STARTS, sink.text, sink.cut_marker))) is not None:
        reader.record()
        try:
            if found == START:
                reader.take(len(START))
                yield from reader.peek_past_space()
            if not (yield from reader.skips(FUNCTION)):
                raise BrokenError
            name = yield from _read_name(reader, MAX_TOOL_NAME_CHARS)
        except BrokenError:
            sink.no_call(reader)
        else:
            reader.recorded()
            sink.call(name)
            yield from _scan_parameters(reader, sink, tools.get(name, {}))


def _read_name(reader: Reader, max_chars: int | None = None) -> Steps[str]:
    """What an opening tag names, with the end of the tag."""
    name = (yield from reader.whole_run(_NAME, max_chars)).strip()
    if not name or not (yield from reader.skips(">")):
        raise BrokenError
    return name


def _scan_parameters(reader: Reader, sink: Sink, schema: Mapping[str, Any]) -> Steps[None]:
    separator = "{"
    try:
        while (yield from reader.peek_past_space()) and (yield from reader.skips(PARAMETER)):
            key = yield from _read_name(reader)
            sink.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from _scan_value(reader, sink, _types(schema, key))
            separator = ", "
        if not (yield from reader.peek()):
            return  # the text is over
        sink.arguments("{}" if separator == "{" else "}")
        yield from reader.until((FUNCTION_END, END), sink.text, drop)
        yield from reader.skips(FUNCTION_END)
        yield from reader.peek_past_space()
    except BrokenError:
        yield from reader.until((END,), sink.arguments, drop)
    yield from reader.skips(END)


def _scan_value(reader: Reader, sink: Sink, types: frozenset[str]) -> Steps[None]:
    if types <= {"string"}:
        text = _QuotedText(sink)
        found = yield from reader.until((PARAMETER_END,), text.write, drop)
        text.end(is_whole=found is not None)
    else:
        pieces: list[str] = []
        found = yield from reader.until((PARAMETER_END,), pieces.append)
        value = _trimmed("".join(pieces))
        if found is not None:
            sink.arguments(_as_json(value, types))
    if found is None:
        raise BrokenError
    reader.take(len(PARAMETER_END))


class _QuotedText:
    """A text on its way into a JSON string, without the line breaks next to its tags."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._opener = '"'
        self._held = ""

    def write(self, piece: str) -> None:
        if self._opener:
            self._sink.arguments(self._opener)
            self._opener = ""
            piece = piece.removeprefix("\n")
        piece = self._held + piece
        kept = piece.removesuffix("\n")
        self._held = piece[len(kept) :]
        self._sink.arguments(escaped(kept))

    def end(self, *, is_whole: bool) -> None:
        if is_whole:
            self._sink.arguments(self._opener + '"')


def _trimmed(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _types(schema: Schema, key: str) -> frozenset[str]:
    """The JSON types that a parameter may have; none if the schema does not say."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return frozenset()
    return _types_of(properties.get(key), schema, _MAX_REFERENCES)


_MAX_REFERENCES = 16


def _types_of(schema: object, root: Schema, num_left: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not num_left:
        return frozenset()
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    found = frozenset(k for k in kinds if isinstance(k, str))
    if found:
        return found
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []
    if isinstance(ref := schema.get("$ref"), str):
        with suppress(LookupError, TypeError, ValueError):
            parts = [resolve(root, ref)]
    if isinstance(parts, list) and parts:
        return frozenset().union(*(_types_of(each, root, num_left - 1) for each in parts))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return frozenset()
    return frozenset().union(*(_type_of(value) or {"string"} for value in values))


def _as_json(value: str, types: frozenset[str]) -> str:
    """A value as what its schema says; as a text where it is nothing of the kind."""
    text = value.strip()
    if "boolean" in types and text in ("True", "False"):
        return text.lower()
    try:
        decoded = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return text if _type_of(decoded) & types else json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _type_of(value: object) -> frozenset[str]:
    """The types that a decoded value is of. A text in quotes is a text with quotes."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"})
        case str():
            return frozenset()
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


def write_calls(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    end = f"{grammar.marker(FUNCTION_END)} {literal(_NEWLINE)} {grammar.marker(END)}"
    calls = [_written_call(grammar, tool) for tool in tools]
    return [Block(START, f"{literal(_NEWLINE)} {one_of(calls)} {end}", _NEWLINE)]


_NEWLINE = "\n"


def _written_call(grammar: Grammar, tool: BoundTool) -> str:
    schema = tool.schema
    properties = schema.get("properties")
    opening = grammar.marker(f"{FUNCTION}{tool.name}>\n")
    if properties:
        required = schema.get("required", ())
        parameters = [
            grammar.rule(_written_parameter(grammar, tool, name)) + "?" * (name not in required)
            for name in properties
            if _is_writable(name, schema)
        ]
        return grammar.rule(f"{opening} {' '.join(parameters)}")
    if properties is None and schema.get("additionalProperties") is not False:
        return grammar.rule(f"{opening} {_any_parameter(grammar)}*")
    return grammar.rule(opening)


def _is_writable(name: str, schema: Schema) -> bool:
    is_writable = _NAME.fullmatch(name) is not None and name == name.strip()
    if not is_writable and name in schema.get("required", ()):
        raise InvalidRequestError(
            f"tools: this model's notation cannot write a parameter called {name[:80]!r}", "tools"
        )
    return is_writable


def _any_parameter(grammar: Grammar) -> str:
    name = grammar.terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}/")
    opening = f"{grammar.marker(PARAMETER)} {name} {grammar.marker('>' + _NEWLINE)}"
    return grammar.rule(f"{opening} {_text(grammar)}")


def _written_parameter(grammar: Grammar, tool: BoundTool, name: str) -> str:
    opening = grammar.marker(f"{PARAMETER}{name}>\n")
    return f"{opening} {_written_value(grammar, tool, name)}"


def _written_value(grammar: Grammar, tool: BoundTool, name: str) -> str:
    schema = tool.schema["properties"][name]
    choices = [_written_choice(grammar, tool, each) for each in _choices(schema)]
    if None in choices:
        return _text(grammar)
    return f"{one_of(each for each in choices if each)} {grammar.marker(_VALUE_END)}"


def _choices(schema: Schema | bool) -> Sequence[Schema | bool]:
    """The schemas of which a value has to have one."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema, Mapping) and key in schema:
            return cast(Sequence[Schema | bool], schema[key])
    return [schema]


def _written_choice(grammar: Grammar, tool: BoundTool, schema: Schema | bool) -> str | None:
    """None: any text."""
    kinds = _types_of(schema, tool.schema, _MAX_REFERENCES)
    if isinstance(schema, bool) or not kinds:
        return None
    if "string" not in kinds:
        return grammar.json(with_style(alone(tool.schema, schema), tool.style))
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if not values or not all(isinstance(v, str) and PARAMETER_END not in v for v in values):
        return None
    return one_of(map(literal, values))


_VALUE_END = f"\n{PARAMETER_END}\n"


def _text(grammar: Grammar) -> str:
    """Any text; how long it is and what it matches is not bound."""
    if grammar.is_token(PARAMETER_END):
        return f"{grammar.text_without((PARAMETER_END,))} {grammar.marker(_VALUE_END)}"
    return grammar.text_through(_VALUE_END)
