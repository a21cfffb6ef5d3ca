"""The message of one choice, in deltas of any size."""

import msgspec
import pytest

from api import message_plan
from api.answer_bodies import ChatDelta
from api.markup import Markup
from api.reasoning import FAMILIES as THOUGHTS
from api.routes.chat_messages import MessageWriter
from api.tools.request import ToolRequest
from api.tools.select import MISTRAL
from engine.errors import UnsupportedFieldError
from tests.helpers.message_events import TOOLS

NOTHING = frozenset[int]()
MARKUP = Markup(MISTRAL, THOUGHTS["qwen3"], frozenset({1}), frozenset({2}))


def tools(*, is_parallel: bool = True) -> ToolRequest:
    return ToolRequest([], TOOLS, is_parallel)


def writer(**options: bool) -> MessageWriter:
    plan = message_plan.make(MARKUP, tools(**options), None)
    return MessageWriter(plan, is_thinking=True)


def as_json(deltas: list[ChatDelta]) -> list[dict[str, object]]:
    return [msgspec.to_builtins(delta) for delta in deltas]


TEXT = 'Hm</think>Look: [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]'


def test_all_in_one_piece_is_as_many_deltas_as_there_are_things_to_say() -> None:
    """After a stall, or many tokens at once: each delta says one thing, in order."""
    deltas = as_json(writer().deltas(TEXT, is_last=True))

    ids = [delta["tool_calls"][0].pop("id") for delta in (deltas[2], deltas[4])]  # type: ignore[index]
    assert deltas == [
        {"reasoning": "Hm", "reasoning_content": "Hm"},
        {"content": "Look:"},
        {"tool_calls": [{"index": 0, "type": "function", "function": call("f")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {"tool_calls": [{"index": 1, "type": "function", "function": call("g")}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    assert all(len(each) == 9 for each in ids), "as Mistral's templates insist"


def call(name: str) -> dict[str, str]:
    return {"name": name, "arguments": ""}


def test_one_call_means_the_first() -> None:
    """Also where more come in the same piece."""
    deltas = as_json(writer(is_parallel=False).deltas(TEXT, is_last=True))
    message = writer(is_parallel=False).message(TEXT)

    assert len(deltas) == 4
    assert isinstance(message.tool_calls, list)
    assert [each.function.name for each in message.tool_calls] == ["f"]


def test_finish_reason_is_that_of_calls_only_where_there_are_some() -> None:
    """And only in place of stop."""
    with_calls, without = writer(), writer()
    with_calls.message(TEXT)
    without.message("Hm</think>No.")

    assert with_calls.finish_reason("stop") == "tool_calls"
    assert with_calls.finish_reason("length") == "length"
    assert with_calls.finish_reason(None) is None
    assert without.finish_reason("stop") == "stop"


def test_plan_holds_no_more_than_the_request_needs() -> None:
    """A request without tools keeps no markers of calls; a model without either is plain."""
    plain = Markup(None, None, NOTHING, NOTHING)

    assert message_plan.make(plain, None, None).is_plain
    assert not message_plan.make(MARKUP, None, None).is_plain
    assert message_plan.make(MARKUP, None, None).kept_token_ids == {2}
    assert message_plan.make(MARKUP, tools(), None).kept_token_ids == {1, 2}
    with pytest.raises(UnsupportedFieldError, match="--tool-call-parser"):
        message_plan.make(plain, tools(), None)
