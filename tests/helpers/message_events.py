"""Texts cut into pieces, and what parsers make of them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from api.message_parser import MessageEvent, MessageParser, Reasoning, merged
from api.tools.base import Arguments, CallStart, Text
from api.tools.select import FAMILIES

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        },
    },
    "get_time": {"type": "object", "properties": {}},
}


def feed(parser: MessageParser, pieces: Iterable[str]) -> list[MessageEvent]:
    """All events of a text that comes in these pieces."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def parse(family: str, *pieces: str) -> list[MessageEvent]:
    """The same, for a family of tool calls."""
    return feed(MessageParser(FAMILIES[family], TOOLS), pieces)


def texts(events: Iterable[MessageEvent]) -> list[Any]:
    """Events in short: texts as they are, thoughts and calls as tuples."""
    short: list[Any] = []
    for event in events:
        match event:
            case Text(text):
                short.append(text)
            case Reasoning(text):
                short.append(("thinks", text))
            case CallStart(name):
                short.append((name, ""))
            case Arguments(text):
                short[-1] = (short[-1][0], text)
    return short


@st.composite
def cuts(draw: st.DrawFn, fragments: Sequence[str]) -> list[str]:
    """A text made of fragments, and cut anywhere."""
    text = "".join(draw(st.lists(st.sampled_from(fragments), max_size=14)))
    places = draw(st.lists(st.integers(0, len(text)), max_size=12))
    bounds = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]
