"""Mistral: a marker, then a list, or a name and its arguments. Old models write the first, new ones
the second.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, …]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]…
"""

import re
from collections.abc import Sequence

from api.limits import MAX_TOOL_NAME_CHARS
from api.structured.lark import Grammar, literal, one_of
from api.tools.base import Sink, Tools
from api.tools.binding import Block, BoundTool
from api.tools.json_scan import JsonCall, copy_arguments
from api.tools.reader import BrokenError, Reader, Steps

START = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
MARKERS = (START, CALL_ID, ARGUMENTS)

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


def scan(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    while (yield from reader.until((START,), sink.text, sink.cut_marker)) is not None:
        reader.record()
        reader.take(len(START))
        try:
            yield from _scan_calls(reader, sink)
        except BrokenError:
            sink.no_call(reader)


def _scan_calls(reader: Reader, sink: Sink) -> Steps[None]:
    """Raises BrokenError where what was recorded is no call."""
    match (yield from reader.peek_past_space()):
        case "[":
            if (yield from reader.starts_with(START)):
                raise BrokenError
            reader.take(1)
            yield from _scan_list(reader, sink)
        case "{":
            yield from JsonCall(reader, sink).read()
        case _:
            yield from _scan_named(reader, sink)


def _scan_list(reader: Reader, sink: Sink) -> Steps[None]:
    while True:
        yield from JsonCall(reader, sink).read()
        reader.record()
        if (yield from reader.peek_past_space()) != ",":
            break
        reader.take(1)
    if (yield from reader.peek()) == "]":
        reader.take(1)
        reader.recorded()


def _scan_named(reader: Reader, sink: Sink) -> Steps[None]:
    name = yield from reader.whole_run(_NAME, MAX_TOOL_NAME_CHARS)
    if (yield from reader.skips(CALL_ID)):
        yield from reader.whole_run(_NAME, MAX_TOOL_NAME_CHARS)
    yield from reader.skips(ARGUMENTS)
    if not name or (yield from reader.peek_past_space()) != "{":
        raise BrokenError
    reader.recorded()
    sink.call(name)
    yield from copy_arguments(reader, sink.arguments)


def write_calls(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    """As new models do."""
    calls = [tool.between(grammar, tool.name + ARGUMENTS, "") for tool in tools]
    return [Block(START, one_of(calls), "")]


def write_list(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    """As old models do."""
    call = grammar.rule(one_of(tool.as_json(grammar, "arguments") for tool in tools))
    more = f"({literal(', ')} {call})*" if many else ""
    return [Block(START, f"{literal(' [')} {call} {more} {literal(']')}")]
