"""Items of a request: read within bounds, and as messages for a chat template."""

import contextlib
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.responses import input_items
from api.responses.items import FunctionCall
from api.responses.messages import to_messages
from api.responses.packed_thought import pack
from engine.errors import InvalidRequestError, RequestError, UnsupportedFieldError


def find_nothing(item_id: str) -> None:
    """There are no earlier responses."""


def read(value: Any) -> Any:
    """The items, as a client would see them."""
    return msgspec.to_builtins(
        input_items.read(msgspec.Raw(json.dumps(value).encode()), find_nothing)
    )


def messages(items: Any, instructions: str | None = None, *, knows_developers: bool = False) -> Any:
    raw = msgspec.Raw(json.dumps(items).encode())
    return to_messages(
        input_items.read(raw, find_nothing), instructions, knows_developers=knows_developers
    )


def user(content: Any = "x") -> dict[str, Any]:
    return {"role": "user", "content": content}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "y"}


def test_all_forms_of_a_text_are_one() -> None:
    """A text, a message with a text, and one with parts."""
    forms = ["x", [user()], [{"type": "message", **user([{"type": "input_text", "text": "x"}])}]]

    for form in forms:
        [item] = read(form)
        assert item.pop("id").startswith("msg_")
        assert item == {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "x"}],
            "status": "completed",
        }


def test_names_of_items_stay() -> None:
    """Clients page through them by these."""
    assert [item["id"] for item in read([{**user(), "id": "mine"}, {**CALL, "id": "fc"}])] == [
        "mine",
        "fc",
    ]


def test_what_the_model_said_is_its_text() -> None:
    """Texts and refusals, in one piece; annotations and the like are skipped over."""
    parts = [
        {"type": "output_text", "text": "a", "annotations": [{"type": "url_citation"}]},
        {"type": "refusal", "refusal": "b"},
    ]
    item = {"type": "message", "role": "assistant", "status": "completed", "content": parts}

    assert messages([user(), item])[1] == {"role": "assistant", "content": "ab"}
    assert messages([user(), {**item, "content": []}])[1] == {"role": "assistant", "content": ""}


def test_one_turn_of_the_model_is_one_message() -> None:
    """A second thought, or a second text, begins another."""
    thought = {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "h"}]}
    said = {"role": "assistant", "content": "z"}

    found = messages([user(), thought, said, CALL, {**CALL, "call_id": "d"}, thought, said])

    assert [each["role"] for each in found] == ["user", "assistant", "assistant"]
    assert [call["id"] for call in found[1]["tool_calls"]] == ["c", "d"]
    assert found[2] == {
        "role": "assistant",
        "content": "z",
        "reasoning": "h",
        "reasoning_content": "h",
    }


def test_a_thought_alone_keeps_its_place() -> None:
    """It was cut off: the conversation still takes turns."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "h"}]}

    assert [each["role"] for each in messages([user(), thought, user()])] == [
        "user",
        "assistant",
        "user",
    ]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_packed_thought_is_the_thought_again(text: str) -> None:
    """Where a client sends back nothing else of it; what is there in full comes first."""
    thought = {"type": "reasoning", "summary": [], "encrypted_content": pack(text)}
    full = {**thought, "content": [{"type": "reasoning_text", "text": "h"}]}

    assert messages([user(), thought])[1]["reasoning"] == text
    assert messages([user(), full])[1]["reasoning"] == "h"


@pytest.mark.parametrize("packed", ["abc", "raywire-thought:abc", "raywire-thought:/w==", ""])
def test_a_thought_that_was_encrypted_elsewhere_is_empty(packed: str) -> None:
    """It was another server's."""
    thought = {"type": "reasoning", "summary": [], "encrypted_content": packed}

    assert messages([user(), thought, {"role": "assistant", "content": "z"}])[1]["content"] == "z"


def test_a_result_names_its_call() -> None:
    """And its function, for templates that want it."""
    [_, _, result] = messages([user(), CALL, RESULT])

    assert result == {"role": "tool", "tool_call_id": "c", "name": "f", "content": "y"}


def test_system_messages_at_the_start_are_one() -> None:
    """Templates know one; later ones stay where they are. Developers are the system to templates
    that have not heard of them."""
    items = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        user(),
        {"role": "developer", "content": "c"},
    ]

    plain = messages(items, "i")
    modern = messages(items, "i", knows_developers=True)

    assert plain[0] == modern[0] == {"role": "system", "content": "i\n\na\n\nb"}
    assert [each["role"] for each in plain] == ["system", "user", "system"]
    assert [each["role"] for each in modern] == ["system", "user", "developer"]


def test_parts_stay_parts() -> None:
    """The template joins them in its own way."""
    parts = [{"type": "input_text", "text": text} for text in "ab"]

    assert messages([user(parts)])[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]


def test_a_reference_is_what_it_refers_to() -> None:
    """The very item; one that is not there is named."""
    kept = FunctionCall("fc_1", "c", "f", "{}")
    raw = msgspec.Raw(b'[{"type":"item_reference","id":"fc_1"}]')

    assert input_items.read(raw, {"fc_1": kept}.get)[0] is kept
    with pytest.raises(input_items.ItemNotFoundError) as caught:
        input_items.read(raw, find_nothing)
    assert caught.value.param == "input[0].id"


BAD: list[tuple[Any, str, type[RequestError]]] = [
    ([[]], "input[0]", InvalidRequestError),
    ([user(), {"type": 5}], "input[1].type", InvalidRequestError),
    ([user([])], "input[0].content", InvalidRequestError),
    ([user([5])], "input[0].content[0]", InvalidRequestError),
    ([user([{"text": "x"}])], "input[0].content[0]", InvalidRequestError),
    ([user([{"type": "input_text"}])], "input[0].content[0].text", InvalidRequestError),
    ([user([{"type": "input_file"}])], "input[0].content[0]", UnsupportedFieldError),
    ([user([{"type": "refusal", "refusal": "x"}])], "input[0].content[0]", UnsupportedFieldError),
    ([{**user(), "id": "x" * 257}], "input[0].id", InvalidRequestError),
    ([{**CALL, "call_id": None}], "input[0].call_id", InvalidRequestError),
    ([{**CALL, "name": "x" * 1000}], "input[0].name", InvalidRequestError),
    ([{**CALL, "arguments": {}}], "input[0].arguments", InvalidRequestError),
    ([CALL, {**RESULT, "output": None}], "input[1].output", InvalidRequestError),
    ([CALL, {**RESULT, "output": [{"type": "input_image"}]}], "input[1].output[0]",
     UnsupportedFieldError),
    ([{"type": "reasoning", "content": "x"}], "input[0].content", InvalidRequestError),
    ([{"type": "reasoning", "summary": [{"type": "x"}]}], "input[0].summary[0]",
     UnsupportedFieldError),
    ([{"type": "custom_tool_call"}], "input[0].type", UnsupportedFieldError),
]  # fmt: skip


@pytest.mark.parametrize(("value", "param", "kind"), BAD)
def test_bad_items_are_named(value: Any, param: str, kind: type[RequestError]) -> None:
    """By their place in the request."""
    with pytest.raises(kind) as caught:
        read(value)

    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        "[" + ",".join(["{}"] * 1_000_000) + "]",
        "[" * 1_000_000,
        '[{"role":"user","content":['
        + ",".join(['{"type":"input_text","text":""}'] * 100_000)
        + "]}]",
        '[{"role":"user","content":"x","extra":' + "[" * 900 + "]" * 900 + "}]",
        '[{"role":"user","content":"x","extra":[' + ",".join(["{}"] * 1_000_000) + "]}]",
    ],
)
def test_monstrous_items_cost_little(body: str) -> None:
    """Values are counted before anything is made of them, and unknown ones skipped over."""
    began = time.thread_time()
    with contextlib.suppress(InvalidRequestError):
        input_items.read(msgspec.Raw(body.encode()), find_nothing)

    assert time.thread_time() - began < 0.2
