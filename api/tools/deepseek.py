"""DeepSeek V3, R1 and V3.1: markers around each call, and around all of them.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
    <｜tool▁call▁end｜><｜tool▁call▁begin｜>…<｜tool▁calls▁end｜>

So since V3.1. Before, the kind of call took the name's place, and the name followed:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
"""

import re
from collections.abc import Sequence

from api.limits import MAX_TOOL_NAME_CHARS
from api.structured.lark import Grammar, one_of
from api.tools.base import Sink, Tools
from api.tools.binding import Block, BoundTool
from api.tools.json_scan import copy_arguments
from api.tools.reader import BrokenError, Reader, Steps, drop

FIRST = "<｜tool▁calls▁begin｜>"
LAST = "<｜tool▁calls▁end｜>"
START = "<｜tool▁call▁begin｜>"
SEPARATOR = "<｜tool▁sep｜>"
END = "<｜tool▁call▁end｜>"
MARKERS = (FIRST, LAST, START, SEPARATOR, END)
_OUTER = (FIRST, START, LAST)

_LINE = re.compile(r"[^\n<{`]+")
_NAME = re.compile(r"[\w.:/\-]+")


def scan(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    while (found := (yield from reader.until(_OUTER, sink.text, sink.cut_marker))) is not None:
        if found == START:
            yield from _scan_call(reader, sink)
        else:
            reader.take(len(found))  # says nothing that the calls do not say
            sink.marker()


def _scan_call(reader: Reader, sink: Sink) -> Steps[None]:
    reader.record()
    reader.take(len(START))
    try:
        name = yield from _read_name(reader)
    except BrokenError:
        sink.no_call(reader)
        return
    reader.recorded()
    sink.call(name)
    if (yield from reader.starts_with(END)):
        sink.arguments("{}")
    else:
        yield from _scan_arguments(reader, sink)
    yield from reader.skips(END)


def _read_name(reader: Reader) -> Steps[str]:
    """The name, with all up to the arguments or the end marker."""
    kind = yield from reader.whole_run(_LINE, MAX_TOOL_NAME_CHARS)
    if not (yield from reader.skips(SEPARATOR)):
        raise BrokenError
    following = yield from reader.peek_past_space()
    if following in "{<":
        name = kind
    else:
        name = yield from reader.whole_run(_LINE, MAX_TOOL_NAME_CHARS)
        yield from _skip_fence(reader)
        following = yield from reader.peek()
    if _NAME.fullmatch(name.strip()) is None or not following:
        raise BrokenError
    return name.strip()


def _skip_fence(reader: Reader) -> Steps[None]:
    if (yield from reader.peek_past_space()) == "`":
        yield from reader.skips("```")
        yield from reader.skips("json")
        yield from reader.peek_past_space()


def _scan_arguments(reader: Reader, sink: Sink) -> Steps[None]:
    try:
        yield from copy_arguments(reader, sink.arguments)
    except BrokenError:
        yield from reader.until((END,), sink.arguments, drop)
    else:
        yield from _skip_fence(reader)


def write_calls(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    """As since V3.1."""
    calls = [tool.between(grammar, START + tool.name + SEPARATOR, END) for tool in tools]
    return _written(grammar, one_of(calls), "", many)


def write_fenced(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    """As before."""
    before = START + "function" + SEPARATOR
    calls = [
        tool.between(grammar, f"{before}{tool.name}\n```json\n", f"\n```{END}") for tool in tools
    ]
    return _written(grammar, one_of(calls), "\n", many)


def _written(grammar: Grammar, body: str, separator: str, many: bool) -> Sequence[Block]:
    call = grammar.rule(body)
    more = f"({grammar.marker(separator)} {call})*" if many else ""
    return [Block(FIRST, f"{call} {more} {grammar.marker(LAST)}")]
