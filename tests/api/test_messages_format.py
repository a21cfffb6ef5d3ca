"""The blocks of a message, whole and as events, of whatever a model writes. Pure."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api import message_plan
from api.anthropic.format import INVALID_JSON, BlockEvents, blocks, input_of
from api.markup import Markup
from api.message_plan import MessageReader
from api.reasoning import FAMILIES as THOUGHTS
from api.tools.request import ToolRequest
from api.tools.select import HERMES
from tests.helpers.anthropic_stream import joined_blocks, parse
from tests.helpers.message_events import TOOLS, cuts

NOTHING: frozenset[int] = frozenset()
FRAGMENTS = [
    "<think>",
    "</think>",
    "\n",
    "some words",
    "é🙂",
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>',
    '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
    '<tool_call>\n{"name": "get_time"}\n</tool_call>',
    "<tool_call>",
    "<tool_",
    "</thi",
    "{}",
]


def reader() -> MessageReader:
    """Looks for thoughts and calls."""
    markup = Markup(HERMES, THOUGHTS["qwen3"], NOTHING, NOTHING)
    plan = message_plan.make(markup, ToolRequest([], TOOLS, True), None)
    return MessageReader(plan, is_thinking=False)


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "id"} for each in content]


@settings(max_examples=150)
@given(pieces=cuts(FRAGMENTS))
def test_events_add_up_to_the_blocks_however_the_text_is_cut(pieces: list[str]) -> None:
    """Kinds, order, texts and inputs."""
    reading = reader()
    events = BlockEvents(reading)
    stream = [events.add(news) for piece in pieces for news in reading.read(piece, is_last=False)]
    stream += [events.add(news) for news in reading.read("", is_last=True)]
    streamed = joined_blocks(parse(b"".join([*stream, events.end()]).decode()))

    another = reader()
    whole = msgspec.to_builtins(blocks(another.read("".join(pieces), is_last=True), another))
    assert without_ids(streamed) == without_ids(whole)


@pytest.mark.parametrize("text", ["{", "[1]", "7", '"x"', "nul", '{"a": 1}}', "[" * 10_000])
def test_what_is_no_object_is_kept_as_it_is(text: str) -> None:
    """For the client, which may show it to the model."""
    assert input_of(text) == {INVALID_JSON: text}


@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers(-9, 9) | st.text(max_size=5)))
def test_an_object_is_what_it_says(value: dict[str, Any]) -> None:
    """And nothing at all is an empty one."""
    assert input_of(json.dumps(value)) == value
    assert input_of("") == {}
