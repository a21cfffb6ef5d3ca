"""Hermes and Qwen: JSON between markers.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from collections.abc import Sequence

from api.structured.lark import Grammar, literal, one_of
from api.tools.base import Sink, Tools
from api.tools.binding import Block, BoundTool
from api.tools.json_scan import JsonCall
from api.tools.reader import BrokenError, Reader, Steps, drop

START = "<tool_call>"
END = "</tool_call>"
MARKERS = (START, END)


def scan(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    while (yield from reader.until((START,), sink.text, sink.cut_marker)) is not None:
        yield from _scan_call(reader, sink)


def _scan_call(reader: Reader, sink: Sink) -> Steps[None]:
    reader.record()
    reader.take(len(START))
    call = JsonCall(reader, sink)
    try:
        yield from call.read()
    except BrokenError:
        if call.is_begun:
            write = sink.text if call.has_arguments else sink.arguments
            # All up to the end marker belongs to the call, good JSON or not.
            yield from reader.until((END,), write, drop)
        else:
            sink.no_call(reader)
            return
    while (yield from reader.peek_past_space()) == "}":  # one too many is a usual mistake
        reader.take(1)
    yield from reader.skips(END)


def write_calls(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    call = one_of(tool.as_json(grammar, "arguments") for tool in tools)
    newline = literal("\n")
    return [Block(START, f"{newline} {call} {newline} {grammar.marker(END)}", "\n")]
