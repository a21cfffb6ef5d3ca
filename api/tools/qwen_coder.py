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
from collections.abc import Mapping
from typing import Any, NoReturn

from api.tools.base import Sink, Tools
from api.tools.json_scan import MAX_NAME_CHARS, escaped
from api.tools.reader import BrokenError, Reader, Steps

START = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
MARKERS = (START, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

_NAME = re.compile(r"[^<>\n]+")


def scan(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    while (found := (yield from reader.until((START, FUNCTION), sink.text))) is not None:
        reader.record()
        try:
            if found == START:
                reader.take(len(START))
                yield from reader.peek_past_space()
            name = yield from _read_name(reader, FUNCTION, MAX_NAME_CHARS)
        except BrokenError:
            sink.text(reader.recorded())
        else:
            reader.recorded()
            sink.call(name)
            yield from _scan_parameters(reader, sink, tools.get(name, {}))


def _read_name(reader: Reader, tag: str, max_chars: int | None = None) -> Steps[str]:
    """What an opening tag names."""
    if not (yield from reader.skips(tag)):
        raise BrokenError
    name = (yield from reader.whole_run(_NAME, max_chars)).strip()
    if not name or not (yield from reader.skips(">")):
        raise BrokenError
    return name


def _scan_parameters(reader: Reader, sink: Sink, schema: Mapping[str, Any]) -> Steps[None]:
    separator = "{"
    try:
        while (yield from reader.peek_past_space()) and (yield from reader.starts_with(PARAMETER)):
            key = yield from _read_name(reader, PARAMETER)
            sink.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from _scan_value(reader, sink, _types(schema, key))
            separator = ", "
        if not (yield from reader.peek()):
            return  # the text is over
        sink.arguments("{}" if separator == "{" else "}")
        yield from reader.until((FUNCTION_END, END), sink.text)
        yield from reader.skips(FUNCTION_END)
        yield from reader.peek_past_space()
    except BrokenError:
        yield from reader.until((END,), sink.arguments)
    yield from reader.skips(END)


def _scan_value(reader: Reader, sink: Sink, types: frozenset[str]) -> Steps[None]:
    if types <= {"string"}:
        text = _QuotedText(sink)
        found = yield from reader.until((PARAMETER_END,), text.write)
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


def _types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a parameter may have; none if the schema does not say."""
    properties = schema.get("properties")
    return _types_of(properties.get(key)) if isinstance(properties, Mapping) else frozenset()


def _types_of(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    types = frozenset(k for k in kinds if isinstance(k, str))
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list):
        types = types.union(*map(_types_of, choices))
    return types


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
