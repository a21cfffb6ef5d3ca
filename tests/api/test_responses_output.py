"""Items and events of an answer, however it comes in pieces."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from api.markup import Markup
from api.message_plan import MessageReader
from api.message_plan import make as make_plan
from api.output_processor import OutputDelta, PositionLogprobs, TokenLogprob
from api.reasoning import FAMILIES as THOUGHTS
from api.responses.events import EventLog, NoEvents
from api.responses.output import OutputWriter
from api.tools.request import ToolRequest
from api.tools.select import FAMILIES
from tests.helpers.message_events import TOOLS, cuts
from tests.helpers.responses import events

PLAN = make_plan(
    Markup(FAMILIES["hermes"], THOUGHTS["qwen3"], frozenset(), frozenset()),
    ToolRequest([], TOOLS, True),
    None,
)
FRAGMENTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "get_time", "arguments": {}}',
    '{"name": "get_weather", "arguments": {"city": "Köln"}}', " ", "\n", "Hm 🙂", "x", "<", "{",
)  # fmt: skip


def token(text: str) -> PositionLogprobs:
    chosen = TokenLogprob(0, text, text.encode(), -0.5, 1)
    return PositionLogprobs(chosen, [])


def delta(text: str, *, has_logprobs: bool = False, is_last: bool = False) -> OutputDelta:
    """What comes of one token a character."""
    return OutputDelta(
        text=text,
        token_ids=[len(char.encode()) for char in text],
        logprobs=[token(char) for char in text] if has_logprobs else None,
        prompt_logprobs=None,
        finish_reason="stop" if is_last else None,
        stop_reason=None,
        failure=None,
    )


def write(pieces: Sequence[str], **options: bool) -> tuple[list[Any], list[dict[str, Any]]]:
    """The items of an answer, and all events about them."""
    log = EventLog()
    writer = OutputWriter(MessageReader(PLAN, is_thinking=False), log, lambda length: length)
    for piece in pieces:
        writer.push(delta(piece, **options))
    writer.push(delta("", is_last=True))
    writer.finish("completed")
    return msgspec.to_builtins(writer.items), events(b"".join(log.take()).decode())


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "item_id")
        }
    return [without_ids(each) for each in value] if isinstance(value, list) else value


@settings(max_examples=100)
@given(cuts(FRAGMENTS))
def test_items_are_those_of_the_whole_text(pieces: list[str]) -> None:
    """However it is cut."""
    items, _ = write(pieces)

    assert without_ids(items) == without_ids(write(["".join(pieces)])[0])


@settings(max_examples=100)
@given(cuts(FRAGMENTS))
def test_a_client_can_rebuild_the_items_from_events(pieces: list[str]) -> None:
    """From the deltas, and again from the items that are done; only the last one is ever open."""
    items, found = write(pieces)

    texts: dict[int, str] = {}
    done: list[Any] = []
    for event in found:
        index = event["output_index"]
        assert index == len(done), "an item begins when the one before it is done"
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index not in texts
                texts[index] = ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["delta"]
                texts[index] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == texts[index]
            case "function_call_arguments.done":
                assert event["arguments"] == texts[index]
            case "output_item.done":
                done.append(event["item"])
    assert done == items
    assert [text_of(item) for item in items] == list(texts.values())


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


@settings(max_examples=60)
@given(
    st.text("ab ", min_size=1, max_size=6).filter(str.strip),
    st.text("cd🙂", min_size=1, max_size=6),
    st.booleans(),
)
def test_logprobs_are_those_of_the_texts_tokens(thought: str, text: str, is_whole: bool) -> None:
    """Neither a marker's nor a thought's; and the thought's tokens are counted."""
    answer = f"<think>{thought}</think>{text}"
    log = NoEvents()
    writer = OutputWriter(MessageReader(PLAN, is_thinking=False), log, lambda length: length)
    for piece in [answer] if is_whole else answer:
        writer.push(delta(piece, has_logprobs=True))
    writer.push(delta("", is_last=True))
    writer.finish("completed")

    [shown, message] = msgspec.to_builtins(writer.items)
    [part] = message["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"] == text
    assert writer.num_reasoning_tokens == len(shown["content"][0]["text"])


def test_text_that_is_not_read_keeps_its_logprobs() -> None:
    """Those of half a character come with the whole one."""
    log = EventLog()
    writer = OutputWriter(None, log, lambda length: length)
    half = OutputDelta(
        text="",
        token_ids=[1],
        logprobs=[token("")],
        prompt_logprobs=None,
        finish_reason=None,
        stop_reason=None,
        failure=None,
    )
    writer.push(half)
    writer.push(delta("é", has_logprobs=True))
    writer.finish("completed")

    [item] = msgspec.to_builtins(writer.items)
    assert len(item["content"][0]["logprobs"]) == 2
    first = next(e for e in events(b"".join(log.take()).decode()) if e["type"].endswith(".delta"))
    assert len(first["logprobs"]) == 2


@settings(max_examples=100)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_a_delta_is_as_if_it_were_encoded_anew(texts: list[str]) -> None:
    """To the byte, whatever the text."""
    log = EventLog()
    writer = OutputWriter(None, log, lambda length: length)
    shown = [text.encode("utf-8", "replace").decode() for text in texts]
    for text in shown:
        writer.push(delta(text))
    found = [e for e in events(b"".join(log.take()).decode()) if e["type"].endswith(".delta")]

    assert [event["delta"] for event in found] == shown
    assert all(
        list(event) == ["type", "item_id", "output_index", "delta", "logprobs", "content_index",
                        "sequence_number"]
        for event in found
    )  # fmt: skip
