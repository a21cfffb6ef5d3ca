"""Gemma: a notation of its own. FunctionGemma's and Gemma 4's differ in their markers only.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Keys are bare, texts stand between quoting markers and hold anything else as it is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from api.limits import MAX_TOOL_NAME_CHARS
from api.structured.keywords import Schema
from api.structured.lark import Grammar, literal, one_of
from api.tools.base import Sink, Tools
from api.tools.binding import Block, BoundTool, WriteCalls
from api.tools.converter import NUMBER, Converter
from api.tools.json_scan import copy_string, escaped, expect
from api.tools.notation import ValueWriter
from api.tools.reader import BrokenError, Reader, Steps, Write, drop


@dataclass(frozen=True, slots=True)
class Notation:
    """The markers of one."""

    start: str
    end: str
    quote: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end, self.quote)


FUNCTION_GEMMA = Notation("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = Notation("<|tool_call>", "<tool_call|>", '<|"|>')

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"[^:{}\[\],<]+")
_BARE = re.compile(r"[^,{}\[\]<]+")


def scan_function_gemma(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    yield from _scan(reader, sink, FUNCTION_GEMMA)


def scan_gemma_4(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    yield from _scan(reader, sink, GEMMA_4)


def _scan(reader: Reader, sink: Sink, notation: Notation) -> Steps[None]:
    while (yield from reader.until((notation.start,), sink.text, sink.cut_marker)) is not None:
        reader.record()
        reader.take(len(notation.start))
        try:
            name = yield from _read_name(reader)
        except BrokenError:
            sink.no_call(reader)
        else:
            reader.recorded()
            sink.call(name)
            yield from _scan_arguments(reader, sink, notation)


def _read_name(reader: Reader) -> Steps[str]:
    yield from reader.peek_past_space()
    if not (yield from reader.skips("call:")):
        raise BrokenError
    name = yield from reader.whole_run(_NAME, MAX_TOOL_NAME_CHARS)
    if not name or (yield from reader.peek_past_space()) != "{":
        raise BrokenError
    return name


def _scan_arguments(reader: Reader, sink: Sink, notation: Notation) -> Steps[None]:
    try:
        yield from _GemmaConverter(reader, sink.arguments, notation.quote).convert_object()
        yield from reader.peek_past_space()
    except BrokenError:
        yield from reader.until((notation.end,), sink.arguments, drop)
    yield from reader.skips(notation.end)


class _GemmaConverter(Converter):
    def __init__(self, reader: Reader, write: Write, quote: str) -> None:
        super().__init__(reader, write)
        self._quote = quote

    def convert_object(self) -> Steps[None]:
        yield from self.convert_items("{}", "{}", self._convert_member)

    def _convert_member(self) -> Steps[None]:
        yield from self._reader.peek_past_space()
        if (yield from self._reader.skips(self._quote)):
            yield from self._convert_text()
        else:
            key = yield from self._reader.whole_run(_KEY)
            if not (yield from self._reader.peek()):
                raise BrokenError  # the text is over, and the key may be half of one
            self._write(json.dumps(key.strip().strip('"'), ensure_ascii=False))
        yield from expect(self._reader, ":")
        self._write(": ")
        yield from self._convert_value()

    def _convert_value(self) -> Steps[None]:
        char = yield from self._reader.peek_past_space()
        if char == "{":
            yield from self.convert_object()
        elif char == "[":
            yield from self.convert_items("[]", "[]", self._convert_value)
        elif char == '"':
            yield from copy_string(self._reader, self._write)
        elif (yield from self._reader.skips(self._quote)):
            yield from self._convert_text()
        else:
            yield from self._convert_bare()

    def _convert_text(self) -> Steps[None]:
        self._write('"')
        yield from self._reader.until(
            (self._quote,), lambda piece: self._write(escaped(piece)), drop
        )
        if not (yield from self._reader.skips(self._quote)):
            raise BrokenError  # the text is over
        self._write('"')

    def _convert_bare(self) -> Steps[None]:
        """A number, a truth value, or a text without quotes."""
        bare = (yield from self._reader.whole_run(_BARE)).strip()
        if not bare or not (yield from self._reader.peek()):
            raise BrokenError
        is_json = bare in ("true", "false", "null") or NUMBER.fullmatch(bare) is not None
        self._write(bare if is_json else json.dumps(bare, ensure_ascii=False))


def write_calls(notation: Notation) -> WriteCalls:
    """How calls are written, for either of the two."""

    def write(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
        written = _GemmaNotation(notation.quote)
        calls = [
            f"{literal(f'call:{tool.name}' + '{')}"
            f" {ValueWriter(grammar, written, tool.schema, tool.style).members(tool.schema)}"
            for tool in tools
        ]
        end = f"{literal('}')} {grammar.marker(notation.end)}"
        return [Block(notation.start, f"{one_of(map(grammar.rule, calls))} {end}", "")]

    return write


_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}:/"


@dataclass(frozen=True, slots=True)
class _GemmaNotation:
    quote: str
    constants: ClassVar[Mapping[object, str]] = {True: "true", False: "false", None: "null"}
    separator: ClassVar[str] = ","

    def text(self, writer: ValueWriter, schema: Schema) -> str:
        """How long it is and what it matches is not bound."""
        grammar = writer.grammar
        return f"{grammar.marker(self.quote)} {grammar.text_through(self.quote)}"

    def one_text(self, writer: ValueWriter, text: str) -> str | None:
        quote = writer.grammar.marker(self.quote)
        return None if self.quote in text else f"{quote} {literal(text)} {quote}"

    def key(self, name: str) -> str | None:
        is_bare = _KEY.fullmatch(name) and name == name.strip().strip('"')
        return literal(f"{name}:") if is_bare else None

    def any_key(self, writer: ValueWriter) -> str:
        return writer.grammar.terminal(_ANY_KEY)
