"""Thoughts apart from what is said, in text that comes in pieces."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api import reasoning
from api.message_parser import MessageParser, Reasoning
from api.reasoning import FAMILIES
from api.tools import select
from api.tools.base import Text
from tests.helpers.message_events import TOOLS, cuts, feed, texts

MARKERS = {(family.start, family.end): name for name, family in FAMILIES.items()}
every_pair = pytest.mark.parametrize("family", MARKERS.values())


def think(
    *pieces: str, family: str = "qwen3", is_thinking: bool = False, tools: bool = False
) -> Any:
    """What a model of a family says with an answer that comes in these pieces."""
    calls = select.FAMILIES["hermes"] if tools else None
    return texts(
        feed(MessageParser(calls, TOOLS, FAMILIES[family], is_thinking=is_thinking), pieces)
    )


@every_pair
def test_thought_comes_before_the_answer(family: str) -> None:
    """Without the white space next to the markers; the answer's own end stays."""
    start, end = FAMILIES[family].start, FAMILIES[family].end
    text = f"\n{start}\nHm, 1 < 2.\n\n{end}\n\nYes. \n"

    for pieces in ([text], [*text]):
        assert think(*pieces, family=family) == [("thinks", "Hm, 1 < 2."), "Yes. \n"]


@every_pair
def test_every_cut_gives_the_same_events(family: str) -> None:
    """Two pieces, cut at each place in turn, also within the markers."""
    start, end = FAMILIES[family].start, FAMILIES[family].end
    text = f"{start} a {end[:-1]} b {end} c {end}"
    whole = think(text, family=family)

    assert whole == [("thinks", f"a {end[:-1]} b"), f"c {end}"]
    for place in range(1, len(text)):
        assert think(text[:place], text[place:], family=family) == whole


@settings(max_examples=300)
@given(
    cuts(("<think>", "</think>", "<thi", "</", "think>", "\n", " ", "x", "é", "<tool_call>", "{")),
    st.booleans(),
    st.booleans(),
)
def test_pieces_give_what_the_whole_text_gives(
    pieces: list[str], is_thinking: bool, tools: bool
) -> None:
    """Whatever the text, inside a thought or not, with tools or not."""
    options: dict[str, Any] = {"is_thinking": is_thinking, "tools": tools}

    assert think(*pieces, **options) == think("".join(pieces), **options)


def test_answer_without_a_thought_stays_as_it_is() -> None:
    """White space included; and a marker later on is text."""
    for text in ("", " ", "\n Hi \n", "<thin", "What is <think>? </think>", "a </think>"):
        assert think(*text) == ([text] if text else [])


def test_thought_that_the_prompt_has_begun() -> None:
    """The answer has the closing marker only; a model may repeat the opening one."""
    for text in ("so\n</think>\n\nYes", "<think>so</think>Yes"):
        assert think(*text, is_thinking=True) == [("thinks", "so"), "Yes"]


def test_thought_that_never_ends_is_all_there_is() -> None:
    """At the token limit: nothing of it becomes content."""
    assert think(*"still thinking </thi", is_thinking=True) == [("thinks", "still thinking </thi")]


def test_thoughts_are_not_held() -> None:
    """They leave as they come, but for what may be the end of them."""
    parser = MessageParser(None, {}, FAMILIES["qwen3"], is_thinking=True)

    assert parser.push("one two ") == [Reasoning("one two")]
    assert parser.push("three </th") == [Reasoning(" three")]
    assert parser.push("e") == [Reasoning(" </the")]
    assert parser.push("</think>Yes") == [Text("Yes")]
    assert parser.push(" \n") == [Text(" \n")]


def test_calls_come_after_the_thought_and_may_end_it() -> None:
    """A marker of a call in the middle of a thought begins the call: models forget to close."""
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    for end in ("</think>\n\n", "\n"):
        assert think(*f"<think>Look.{end}{call}", tools=True) == [
            ("thinks", "Look."),
            ("get_time", "{}"),
        ]


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>user\nWhat is <think><|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_prompt_tells_where_an_answer_begins(prompt: str, is_open: bool) -> None:
    """Whatever the request says about thinking, and whatever users write."""
    assert FAMILIES["qwen3"].is_open_after(prompt) is is_open


def test_some_models_think_without_being_asked() -> None:
    """They need no opening marker, unless the prompt has closed the thought."""
    family = FAMILIES["deepseek_r1"]

    assert family.is_open_after("<｜Assistant｜>")
    assert family.is_open_after("<｜Assistant｜><think>\n")
    assert not family.is_open_after("<｜Assistant｜></think>")


def test_beginning_that_is_continued_may_be_a_thought() -> None:
    """Its last opening marker has no closing one."""
    family = FAMILIES["qwen3"]

    assert family.is_open_in("<think>\nFirst, ")
    assert not family.is_open_in("<think>\nFirst</think> So")
    assert not family.is_open_in("So")


def test_family_is_the_one_whose_closing_marker_the_template_has() -> None:
    """With `auto`; a name is taken as it is."""
    for markers, name in MARKERS.items():
        template = f"{{{{ content.split('{markers[1]}')[-1] }}}}"
        found = reasoning.choose("auto", template)
        assert found is not None
        assert (found.start, found.end) == markers
        assert reasoning.choose(name, None) is FAMILIES[name]
    assert reasoning.choose("auto", "{{ messages }}") is None
    assert reasoning.choose("auto", None) is None
