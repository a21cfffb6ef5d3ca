"""Models whose template shows no calls: a list in JSON, as vLLM has it for calls that must be made.

    [{"name": "get_weather", "parameters": {"city": "Paris"}}, …]

Only a grammar makes a model write it, so it is never looked for in a text.
"""

from collections.abc import Sequence

from api.structured.lark import Grammar, literal, one_of
from api.tools.base import Sink, Tools
from api.tools.binding import Block, BoundTool
from api.tools.json_scan import JsonCall
from api.tools.reader import BrokenError, Reader, Steps


def scan(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    reader.record()
    try:
        while (char := (yield from reader.peek_past_space())) and char in "[,":
            reader.take(1)
            call = JsonCall(reader, sink, tools)
            yield from call.read()
            reader.record()
        yield from reader.skips("]")
        reader.recorded()
    except BrokenError:
        # At the end a limit has cut the text: what is no call yet was to become one.
        if not call.is_begun and (yield from reader.peek()):
            sink.text(reader.recorded())
    yield from reader.pass_rest(sink.text)


def write_calls(grammar: Grammar, tools: Sequence[BoundTool], many: bool) -> Sequence[Block]:
    call = grammar.rule(one_of(tool.as_json(grammar, "parameters") for tool in tools))
    more = f"({literal(', ')} {call})*" if many else ""
    return [Block("[", f"{call} {more} {literal(']')}")]
