"""Anthropic's messages as those that a chat template reads."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.anthropic import conversation
from api.chat_template import ChatTemplate
from engine.errors import InvalidRequestError, UnsupportedFieldError


@dataclass(frozen=True)
class Template:
    takes_late_system: bool = True


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def read(
    *messages: tuple[str, Any], system: Any = None, takes_late_system: bool = True
) -> list[dict[str, Any]]:
    """What becomes of messages, each given by its role and its content."""
    given = conversation.decode(raw([{"role": role, "content": it} for role, it in messages]))
    return conversation.read(raw(system), given, Template(takes_late_system))


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(call_id: str, name: str = "f", **input_: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": input_}


def result(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


def test_texts_and_blocks_of_text_are_alike() -> None:
    """Several texts of a user stay parts: templates have their own ways to join them."""
    cached = {"cache_control": {"type": "ephemeral"}, "citations": None}

    assert read(("user", "a")) == [{"role": "user", "content": "a"}]
    assert read(("user", [text("a", **cached)])) == [{"role": "user", "content": "a"}]
    assert read(("user", [text("a"), text(""), text("b")])) == [
        {"role": "user", "content": [text("a"), text("b")]}
    ]
    assert read(("user", "")) == [{"role": "user", "content": ""}]


def test_system_comes_first() -> None:
    """As a text, or as blocks; the one that differs from request to request is left out, or
    nothing after it would ever be found in the prefix cache."""
    said = [{"role": "system", "content": "be kind\nbe brief"}, {"role": "user", "content": "a"}]
    billing = text("x-anthropic-billing-header: cc_version=2; cch=abc123")

    assert read(("user", "a"), system="be kind\nbe brief") == said
    assert read(("user", "a"), system=[billing, text("be kind"), text("be brief")]) == said
    assert read(("user", "a"), system=[billing]) == said[1:]
    assert read(("user", "a"), system=[]) == said[1:]


def test_system_in_between_stays_where_it_is_if_the_template_lets_it() -> None:
    """If not, it is added to what comes first, rather than refused."""
    messages = (("user", "a"), ("assistant", "b"), ("system", [text("now kind")]), ("user", "c"))

    assert [m["role"] for m in read(*messages)] == ["user", "assistant", "system", "user"]
    assert read(*messages, system="be", takes_late_system=False) == [
        {"role": "system", "content": "be\nnow kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


def test_calls_and_results_are_messages_of_their_own() -> None:
    """Results come before what the user says with them; each knows its call and its name."""
    found = read(
        ("user", "time?"),
        ("assistant", [text("Let me see."), use("1", "clock", zone="é"), use("2", "other")]),
        ("user", [result("1", content=[text("noon"), text("sharp")]), text("and?"), result("2")]),
    )

    calls = [
        {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone":"é"}'}},
        {"id": "2", "type": "function", "function": {"name": "other", "arguments": "{}"}},
    ]
    assert found == [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "content": "noon\nsharp", "tool_call_id": "1", "name": "clock"},
        {"role": "tool", "content": "", "tool_call_id": "2", "name": "other"},
        {"role": "user", "content": "and?"},
    ]


def test_thoughts_go_with_their_message() -> None:
    """Those that only Anthropic can read are nothing."""
    found = read(
        ("user", "a"),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("b"),
            ],
        ),
        ("user", "c"),
    )

    assert found[1] == {"role": "assistant", "content": "b", "reasoning_content": "Hm."}


def test_turns_of_one_role_are_one_turn() -> None:
    """Templates refuse conversations that do not alternate; Anthropic's API joins them."""
    found = read(
        ("user", "a"),
        ("user", [text("b")]),
        ("assistant", "c"),
        ("assistant", [text("d"), use("1")]),
        ("user", [result("1", content="r")]),
        ("user", "e"),
    )

    assert [message["role"] for message in found] == ["user", "assistant", "tool", "user"]
    assert found[0]["content"] == [text("a"), text("b")]
    assert found[1]["content"] == "c\nd"


def test_looked_up_tools_are_told_by_name() -> None:
    """The search for tools of a coding agent finds what was shown from the beginning."""
    reference = {"type": "tool_reference", "tool_name": "clock"}
    found = read(("assistant", [use("1")]), ("user", [result("1", content=[reference])]))

    assert found[1]["content"] == "clock"


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([("robot", "x")], "messages[0].role", "robot"),
        ([("user", None)], "messages[0].content", "text or a list"),
        ([("user", 7)], "messages[0].content", "text or a list"),
        ([("user", {"a": 1})], "messages[0].content", "text or a list"),
        ([("user", ["x"])], "messages[0].content[0]", "object"),
        ([("user", [{"text": "x"}])], "messages[0].content[0]", "type"),
        ([("user", [{"type": "text"}])], "messages[0].content[0].text", "string"),
        (
            [("user", [text("x"), {"type": "text", "text": 1}])],
            "messages[0].content[1].text",
            "str",
        ),
        ([("user", [result("")])], "messages[0].content[0].tool_use_id", "1 to 256"),
        ([("user", [result("1", content=7)])], "messages[0].content[0].content", "text or"),
        ([("assistant", [use("")])], "messages[0].content[0].id", "1 to 256"),
        ([("assistant", [use("1", "x" * 257)])], "messages[0].content[0].name", "1 to 256"),
        (
            [("assistant", [{**use("1"), "input": []}])],
            "messages[0].content[0].input",
            "object",
        ),
        ([("assistant", [{"type": "thinking"}])], "messages[0].content[0].thinking", "string"),
        ([("user", "x"), ("assistant", [use("1")])], "messages", "results"),
        ([("user", [text("x")] * 4097)], "messages[0].content", "4096"),
        ([("user", [text("x")] * 2048)] * 3, "messages[2].content", "4096"),
    ],
)
def test_what_is_wrong_is_named(messages: list[tuple[str, Any]], param: str, words: str) -> None:
    """By its place in the request."""
    with pytest.raises(InvalidRequestError) as caught:
        read(*messages)

    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "image", "source": {"type": "base64", "data": "x" * 1000}}, "no images"),
        ({"type": "document", "source": {}}, "document"),
        ({"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}, "server_tool"),
        ({"type": "x" * 1000}, "xxx"),
    ],
)
def test_blocks_that_no_model_here_reads_are_refused(block: dict[str, Any], words: str) -> None:
    """Also inside a result; in few words."""
    for content in ([block], [result("1", content=[block])]):
        with pytest.raises(UnsupportedFieldError, match=words) as caught:
            read(("user", content))
        assert len(str(caught.value)) < 200


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
USER_BLOCKS = st.one_of(
    TEXTS.map(text), st.builds(lambda t, i: result(i, content=t), TEXTS, st.sampled_from("12"))
)
ASSISTANT_BLOCKS = st.one_of(
    TEXTS.map(text),
    st.sampled_from("12").map(use),
    TEXTS.map(lambda t: {"type": "thinking", "thinking": t}),
)
MESSAGES = st.lists(
    st.one_of(
        st.tuples(st.just("user"), st.one_of(TEXTS, st.lists(USER_BLOCKS, max_size=4))),
        st.tuples(st.just("assistant"), st.one_of(TEXTS, st.lists(ASSISTANT_BLOCKS, max_size=4))),
        st.tuples(st.just("system"), TEXTS),
    ),
    max_size=6,
)


@settings(max_examples=60)
@given(messages=MESSAGES, late=st.booleans())
def test_nothing_is_lost_and_users_and_assistants_do_not_follow_themselves(
    messages: list[tuple[str, Any]], late: bool
) -> None:
    """Whatever a client sends, and in whatever order."""
    found = read(*messages, ("user", "end"), takes_late_system=late)

    roles = [message["role"] for message in found]
    pairs = list(pairwise(roles))
    assert ("user", "user") not in pairs
    assert ("assistant", "assistant") not in pairs
    assert late or "system" not in roles[1:]
    said = [{"content": content} for _, content in [*messages, ("user", "end")]]
    assert sorted(_characters(found)) == sorted(_characters(said))


def _characters(messages: list[dict[str, Any]]) -> str:
    """All that anybody has said or thought, but for line breaks, which join."""
    found = ""
    for message in messages:
        found += message.get("reasoning_content", "")
        content = message["content"] or []
        for block in [text(content)] if isinstance(content, str) else content:
            found += block.get("text", block.get("thinking", block.get("content", "")))
    return found.replace("\n", "")


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", True),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('first') }}{% endif %}{{ m.content }}{% endfor %}",
            False,
        ),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_a_template_is_asked_whether_it_takes_late_system_messages(
    source: str, takes: bool
) -> None:
    """It refuses them, or leaves them out."""
    assert ChatTemplate({"default": source}).takes_late_system is takes


def test_no_template_takes_anything() -> None:
    """And says so when a conversation is rendered."""
    assert not ChatTemplate({}).takes_late_system
