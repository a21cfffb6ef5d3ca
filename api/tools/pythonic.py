"""Pythonic models (Llama 3.2, Llama 4, ToolACE, LFM2): a list of calls in Python's notation.

    [get_weather(city="Paris", days=3), get_time()]

Llama 4 and LFM2 put markers around it, the others do not: there nothing but its form tells calls
from a text. So the list has to begin a line, and its calls must be of tools of the request.

Only literals are read, one character after the other. Nothing here is ever evaluated.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from api.limits import MAX_TOOL_NAME_CHARS
from api.structured.keywords import Schema
from api.structured.lark import Grammar, literal, one_of
from api.structured.lark import escaped as in_pattern
from api.tools.base import Sink, Tools
from api.tools.binding import Block, BoundTool, WriteCalls
from api.tools.converter import NUMBER, Converter
from api.tools.json_scan import escaped, expect
from api.tools.line import Line
from api.tools.notation import ValueWriter
from api.tools.reader import BrokenError, Reader, Steps

STARTS = ("<|python_start|>", "<|tool_call_start|>")
ENDS = ("<|python_end|>", "<|tool_call_end|>")
MARKERS = STARTS + ENDS

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_WORD = re.compile(r"[\w+\-.]+")
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_PLAIN = {
    "'": re.compile(r"[^'\\\n]+"),
    '"': re.compile(r'[^"\\\n]+'),
}
_ESCAPES = {
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9A-Fa-f]")


def scan(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    line = Line(sink)
    while (
        found := (yield from reader.until(("[", *MARKERS), line.text, sink.cut_marker))
    ) is not None:
        if found != "[":
            line.skip_tag(reader, found)
        elif line.is_blank:
            yield from _scan_list(reader, sink, line, tools)
        else:
            line.text(reader.take(1))


def _scan_list(reader: Reader, sink: Sink, line: Line, tools: Tools) -> Steps[None]:
    reader.record()
    reader.take(1)
    try:
        yield from _scan_call(reader, sink, tools)
        while (yield from reader.peek_past_space()) == ",":
            reader.record()
            reader.take(1)
            yield from _scan_call(reader, sink, tools)
        yield from expect(reader, "]")
    except BrokenError:
        line.no_call(reader)


def _scan_call(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Raises BrokenError; what was recorded is then a text."""
    yield from reader.peek_past_space()
    name = yield from reader.whole_run(_NAME, MAX_TOOL_NAME_CHARS)
    if name not in tools or (yield from reader.peek()) != "(":
        raise BrokenError
    yield from _CallConverter(reader, sink, name).convert()


class _CallConverter(Converter):
    """Converts what stands between a call's parentheses. Until there is an argument by name, or
    none at all, it may still be a text."""

    def __init__(self, reader: Reader, sink: Sink, name: str) -> None:
        super().__init__(reader, self._hold)
        self._sink = sink
        self._name = name
        self._held = ""

    def convert(self) -> Steps[None]:
        yield from self.convert_items("()", "{}", self._convert_argument)
        self._begin()

    def _hold(self, piece: str) -> None:
        self._held += piece

    def _begin(self) -> None:
        if self._name:
            self._reader.recorded()
            self._sink.call(self._name)
            self._sink.arguments(self._held)
            self._name = ""
            self._write = self._sink.arguments

    def _convert_argument(self) -> Steps[None]:
        yield from self._reader.peek_past_space()
        key = yield from self._reader.whole_run(_NAME)
        if not key:
            raise BrokenError
        yield from expect(self._reader, "=")
        self._begin()
        self._write(f"{json.dumps(key)}: ")
        yield from self._convert_value()

    def _convert_value(self) -> Steps[None]:
        match (yield from self._reader.peek_past_space()):
            case "'" | '"' as quote:
                yield from self._convert_text(quote)
            case "[":
                yield from self.convert_items("[]", "[]", self._convert_value)
            case "(":
                yield from self.convert_items("()", "[]", self._convert_value)
            case "{":
                yield from self.convert_items("{}", "{}", self._convert_member)
            case _:
                self._write((yield from self._read_word()))

    def _convert_member(self) -> Steps[None]:
        char = yield from self._reader.peek_past_space()
        if char and char in "'\"":
            yield from self._convert_text(char)
        else:
            self._write(json.dumps((yield from self._read_word())))
        yield from expect(self._reader, ":")
        self._write(": ")
        yield from self._convert_value()

    def _read_word(self) -> Steps[str]:
        """A number or a constant, as JSON writes it. Other names stand for what only an interpreter
        knows."""
        word = yield from self._reader.whole_run(_WORD)
        if word in _WORDS:
            return _WORDS[word]
        number = word.replace("_", "").removeprefix("+")
        if NUMBER.fullmatch(number) is None or not (yield from self._reader.peek()):
            self._write(word)
            raise BrokenError
        return number

    def _convert_text(self, quote: str) -> Steps[None]:
        self._reader.take(1)
        self._write('"')
        while (char := (yield from self._reader.peek())) != quote:
            if char == "\\":
                self._reader.take(1)
                self._write(escaped((yield from self._read_escape())))
            elif plain := self._reader.take_run(_PLAIN[quote]):
                self._write(escaped(plain))
            elif char:
                self._write(escaped(self._reader.take(1)))  # a line break that is not escaped
            else:
                raise BrokenError
        self._reader.take(1)
        self._write('"')

    def _read_escape(self) -> Steps[str]:
        """What follows a backslash, as the character that it stands for."""
        char = yield from self._reader.peek()
        if not char:
            raise BrokenError
        self._reader.take(1)
        if char not in _CODE_LENGTHS:
            return _ESCAPES.get(char, "\\" + char)
        digits = ""
        while len(digits) < _CODE_LENGTHS[char] and _HEX.match((yield from self._reader.peek())):
            digits += self._reader.take(1)
        code = int(digits, 16) if len(digits) == _CODE_LENGTHS[char] else None
        if code is None or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            return f"\\{char}{digits}"
        return chr(code)


def write_calls(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    """Without markers, as most do."""
    bodies = {tool.name: _written_arguments(grammar, tool) for tool in tools}
    more = _more(grammar, bodies) if many else ""
    return [
        Block(f"[{name}(", f"{body} {more} {literal(']')}", sign=rf"\[\s*{in_pattern(name)}\(")
        for name, body in bodies.items()
    ]


def write_marked(start: str, end: str) -> WriteCalls:
    """Between markers, as LFM2 does, and Llama 4 with such a template."""

    def write(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
        bodies = {tool.name: _written_arguments(grammar, tool) for tool in tools}
        call = one_of(f"{literal(f'{name}(')} {body}" for name, body in bodies.items())
        more = _more(grammar, bodies) if many else ""
        return [Block(start, f"{literal('[')} {call} {more} {literal(']')} {grammar.marker(end)}")]

    return write


def _more(grammar: Grammar, bodies: Mapping[str, str]) -> str:
    further = one_of(f"{literal(f', {name}(')} {body}" for name, body in bodies.items())
    return f"{grammar.rule(further)}*"


def _written_arguments(grammar: Grammar, tool: BoundTool) -> str:
    """What follows the opening parenthesis, with the closing one."""
    style = replace(tool.style, escapes='nrbtf\\"')
    writer = ValueWriter(grammar, _Python(), tool.schema, style)
    arguments = writer.members(
        tool.schema, _keyword, any_key=f"{grammar.terminal(_ANY_NAME)} {_EQUALS}"
    )
    return grammar.rule(f"{arguments} {literal(')')}")


def _keyword(name: str) -> str | None:
    return literal(f"{name}=") if _NAME.fullmatch(name) else None


_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_EQUALS = '"="'
_PYTHON_TEXT = r"""/"([^"\\\x00-\x1f]|\\["\\nrbtf])*"/"""


class _Python:
    """Python's literals."""

    constants: Mapping[object, str] = {True: "True", False: "False", None: "None"}
    separator = ", "

    def text(self, writer: ValueWriter, schema: Schema) -> str:
        return writer.json_text(schema) or writer.grammar.terminal(_PYTHON_TEXT)

    def one_text(self, writer: ValueWriter, text: str) -> str | None:
        return literal(json.dumps(text, ensure_ascii=False))

    def key(self, name: str) -> str | None:
        return literal(f"{json.dumps(name, ensure_ascii=False)}: ")

    def any_key(self, writer: ValueWriter) -> str:
        return f"{writer.grammar.terminal(_PYTHON_TEXT)} {literal(': ')}"
