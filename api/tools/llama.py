"""Llama 3: JSON and nothing around it.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": …}

Nothing but its form tells a call from an answer that is JSON. So it has to begin a line, to name a
tool of the request, and to have arguments. The tags that some models write around it are left out.
"""

from collections.abc import Sequence

from api.structured.lark import Grammar, escaped, literal, one_of
from api.tools.base import Sink, Tools
from api.tools.binding import Block, BoundTool
from api.tools.json_scan import JsonCall
from api.tools.line import Line
from api.tools.reader import BrokenError, Reader, Steps

TAGS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")


def scan(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    line = Line(sink)
    while (
        found := (yield from reader.until((*TAGS, "{"), line.text, sink.cut_marker))
    ) is not None:
        if found in TAGS:
            line.skip_tag(reader, found)
        elif line.is_blank:
            yield from _scan_call(reader, sink, line, tools)
        else:
            line.text(reader.take(1))


def _scan_call(reader: Reader, sink: Sink, line: Line, tools: Tools) -> Steps[None]:
    reader.record()
    call = JsonCall(reader, sink, tools, needs_arguments=True)
    try:
        yield from call.read()
    except BrokenError:
        if not call.is_begun:
            line.no_call(reader)
            return
    while (yield from reader.peek_past_space()) == ";":
        reader.take(1)


def write_calls(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    call = grammar.rule(one_of(tool.as_json(grammar, "parameters") for tool in tools))
    more = f"({literal('; ')} {call})*" if many else ""
    return [
        Block(
            f'{{"name": "{tool.name}"',
            f"{tool.between(grammar, _PARAMETERS, '}')} {more}",
            sign=rf'\{{\s*"name"\s*:\s*"{escaped(tool.name)}"',
        )
        for tool in tools
    ]


_PARAMETERS = ', "parameters": '
