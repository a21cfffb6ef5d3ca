"""Tools and thoughts in chat completions, whole and streamed, with computed answers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api.tools.select import FAMILIES
from tests.helpers.fake_engine import prompt_as_answer, text_as_answer
from tests.helpers.http_server import HttpServer, events, serving
from tests.helpers.message_events import TOOLS

TEMPLATE = """\
{% for tool in tools or [] %}<tools>{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if thinking is true %}<think>
{% elif thinking is false %}<think></think>{% endif %}{% endif %}"""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": TOOLS["get_weather"], "strict": True},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}

ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE, reasoning_parser="auto") as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    """A server whose model answers with two calls after a text; tests may change that."""
    shared.engine.answer = text_as_answer(f"Let me see.\n{TWO}")
    return shared


def ask(server: HttpServer, **fields: Any) -> httpx.Response:
    response = server.chat(**{"tools": [WEATHER, TIME], "max_tokens": 400, **fields})
    assert response.status_code == 200, response.text
    return response


def whole(server: HttpServer, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = ask(server, **fields).json()["choices"][0]
    return choice


def deltas(chunks: list[Any], index: int = 0) -> list[dict[str, Any]]:
    """Those of one choice, without the role's."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    return [choice["delta"] for choice in choices[1:]]


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {}
    for delta in deltas(chunks, index):
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": {}})
            for name, piece in call["function"].items():
                function = calls[call["index"]]["function"]
                function[name] = function.get(name, "") + piece
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """What a message says: without what is empty, and what is random."""
    said = {name: value for name, value in message.items() if value and name != "role"}
    if "tool_calls" in said:
        said["tool_calls"] = [call["function"] for call in said["tool_calls"]]
    return said


def test_whole_answer_has_openai_shape(server: HttpServer) -> None:
    """Ids, types, arguments as JSON texts; and the finish reason of its own."""
    choice = whole(server)

    ids = [call.pop("id") for call in choice["message"]["tool_calls"]]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "tool_calls": [
            {
                "function": {"name": "get_weather", "arguments": '{"city": "Köln 🙂"}'},
                "type": "function",
            },
            {"function": {"name": "get_time", "arguments": "{}"}, "type": "function"},
        ],
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert len({*ids}) == 2
    assert all(each.startswith("call_") for each in ids)


def test_stream_has_openai_shape(server: HttpServer) -> None:
    """First of a call: index, id, type, name and empty arguments. Then pieces of arguments, and
    nothing else. Last: no delta, and the finish reason."""
    server.engine.answer = text_as_answer(TWO)

    response = ask(server, stream=True)
    chunks = events(response)

    calls = [delta["tool_calls"] for delta in deltas(chunks)[:-1]]
    assert all(len(each) == 1 for each in calls)
    first, *pieces = [call for [call] in calls if call["index"] == 0]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert all(set(piece) == {"index", "function"} for piece in pieces)
    assert all(set(piece["function"]) == {"arguments"} for piece in pieces)
    assert "".join(p["function"]["arguments"] for p in pieces) == '{"city": "Köln 🙂"}'
    assert deltas(chunks)[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert response.text.count("[DONE]") == 1


@pytest.mark.parametrize(
    "text",
    [
        f"Let me see.\n{TWO}",
        f"<think>\nHm.\n</think>\n\n{ONE} Done.",
        "No tool needed. \n",
        "<tool_call> is what I would write, with {braces}",
        f"{ONE[:40]}",
        "",
    ],
)
def test_stream_joined_is_the_whole_answer(server: HttpServer, text: str) -> None:
    """Also with n: each choice by itself."""
    server.engine.answer = text_as_answer(text)
    choice = whole(server)

    chunks = events(ask(server, stream=True, n=2))

    for index in range(2):
        assert without_ids(joined(chunks, index)) == without_ids(choice["message"])
    last = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 1][-1]
    assert last["finish_reason"] == choice["finish_reason"]


def test_model_sees_the_tools_as_they_came(server: HttpServer) -> None:
    """With keys that we do not know; and not at all with `tool_choice` none."""
    server.engine.answer = prompt_as_answer
    tool = {**TIME, "x": [1, {"é": None}]}

    shown = whole(server, tools=[tool])["message"]["content"]
    hidden = whole(server, tools=[tool], tool_choice="none")["message"]["content"]

    assert shown == f"<tools>{json.dumps(tool, ensure_ascii=False)}<user>hi<assistant>"
    assert hidden == "<user>hi<assistant>"


def test_what_looks_like_a_call_is_text_without_tools(server: HttpServer) -> None:
    """Without any, with an empty list, and with `tool_choice` none."""
    server.engine.answer = text_as_answer(ONE)
    nothing: list[dict[str, Any]] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
    for fields in nothing:
        choice = whole(server, **fields)
        assert choice["message"]["content"] == ONE
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_one_call_at_most_without_parallel_calls(server: HttpServer) -> None:
    """The first one; what follows is dropped, whole and streamed."""
    fields = {"parallel_tool_calls": False}

    message = whole(server, **fields)["message"]
    streamed = joined(events(ask(server, stream=True, **fields)))

    for each in (message, streamed):
        assert [call["function"]["name"] for call in each["tool_calls"]] == ["get_weather"]


def test_call_that_is_cut_off_says_so(server: HttpServer) -> None:
    """The finish reason stays length: the arguments are not whole."""
    server.engine.answer = text_as_answer(ONE)
    end = ONE.index("ln 🙂")

    choice = whole(server, max_tokens=end + 1)  # one character has two bytes

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Kö'


def test_stop_string_ends_a_call_too(server: HttpServer) -> None:
    """It counts in what the model writes, wherever that goes."""
    choice = whole(server, stop=["Köl"])

    assert choice["stop_reason"] == "Köl"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


def test_conversation_with_results_is_what_the_template_shows(server: HttpServer) -> None:
    """The assistant's calls as clients send them back, and a result in parts."""
    answer = whole(server)["message"]
    server.engine.answer = prompt_as_answer
    result = [{"type": "text", "text": "3 °C"}]
    messages = [
        {"role": "user", "content": "hi"},
        {**answer, "content": None},
        {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": result},
    ]

    text = whole(server, messages=messages, tool_choice="none")["message"]["content"]

    assert text == (
        '<user>hi<assistant><tool_call>{"name": "get_weather", "arguments": {"city": "Köln 🙂"}}'
        '</tool_call><tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
        "<tool>3 °C<assistant>"
    )


def test_logprobs_and_token_ids_cover_all_tokens(server: HttpServer) -> None:
    """Also those of markers and of text that was held back."""
    fields: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
    plain = whole(server, **fields)

    choices = [chunk["choices"][0] for chunk in events(ask(server, stream=True, **fields))]

    token_ids = [i for choice in choices for i in choice.get("token_ids", [])]
    assert token_ids == plain["token_ids"] == [*f"Let me see.\n{TWO}".encode(), 256]
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert entries == plain["logprobs"]["content"]
    assert len(entries) == len(token_ids)


def test_usage_counts_all_tokens(server: HttpServer) -> None:
    """Of calls and thoughts as of any text; the last chunk has what the whole answer has."""
    usage = ask(server).json()["usage"]

    chunks = events(ask(server, stream=True, stream_options={"include_usage": True}))

    assert usage["completion_tokens"] == len(f"Let me see.\n{TWO}".encode()) + 1
    assert (chunks[-1]["usage"], chunks[-1]["choices"]) == (usage, [])


# --------------------------------------------------------------------------------------- thoughts


def test_thoughts_come_apart(server: HttpServer) -> None:
    """In vLLM's name and in the older one; without tools too."""
    server.engine.answer = text_as_answer("<think>\nHm…\n</think>\n\nYes.")
    for fields in ({}, {"tools": None}):
        message = whole(server, **fields)["message"]
        assert message == {
            "role": "assistant",
            "content": "Yes.",
            "refusal": None,
            "reasoning": "Hm…",
            "reasoning_content": "Hm…",
        }
        streamed = joined(events(ask(server, stream=True, **fields)))
        assert streamed == {"content": "Yes.", "reasoning": "Hm…", "reasoning_content": "Hm…"}


def test_prompt_says_whether_the_answer_begins_with_a_thought(server: HttpServer) -> None:
    """The template has opened it, or closed it, by what the client asked of it."""
    server.engine.answer = text_as_answer("so\n</think>\nYes")

    inside = whole(server, chat_template_kwargs={"thinking": True})["message"]
    outside = whole(server, chat_template_kwargs={"thinking": False})["message"]

    assert (inside["reasoning"], inside["content"]) == ("so", "Yes")
    assert (outside.get("reasoning"), outside["content"]) == (None, "so\n</think>\nYes")


def test_thought_that_is_continued(server: HttpServer) -> None:
    """`continue_final_message` in the middle of one."""
    server.engine.answer = text_as_answer("so</think>Yes")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>And "}]

    message = whole(server, messages=messages, continue_final_message=True)["message"]

    assert (message["reasoning"], message["content"]) == ("so", "Yes")


def test_thought_without_an_end_leaves_no_content(server: HttpServer) -> None:
    """Null, as where there is nothing but calls."""
    server.engine.answer = text_as_answer("<think>on and on")

    choice = whole(server, max_tokens=12)

    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "on an"
    assert choice["finish_reason"] == "length"


def test_thoughts_can_be_left_out(server: HttpServer) -> None:
    """`include_reasoning` false: they are counted, and not shown."""
    server.engine.answer = text_as_answer("<think>Hm</think>Yes.")
    fields = {"include_reasoning": False}

    message = whole(server, **fields)["message"]

    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert joined(events(ask(server, stream=True, **fields))) == {"content": "Yes."}


# --------------------------------------------------------------------------------------- settings


def test_thoughts_are_content_unless_the_operator_says_so() -> None:
    """As in vLLM: `--reasoning-parser` is what tells them apart."""
    text = "<think>Hm</think>Yes."
    with serving(text_as_answer(text), chat_template=TEMPLATE) as server:
        message = whole(server)["message"]

    assert message == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": TIME["function"]}])
@pytest.mark.parametrize("template", [TEMPLATE, "{{ messages }}"])
def test_call_that_must_be_made_is_no_content_where_a_limit_cuts_it(
    template: str, choice: Any
) -> None:
    """Null, and nothing in a stream; in the model's notation, and where that is not known."""
    written = ONE if template == TEMPLATE else '[{"name": "get_time", "parameters": {}}]'
    with serving(text_as_answer(written), chat_template=template) as server:
        for limit in (1, 3, 9):
            fields = {"tools": [TIME], "tool_choice": choice, "max_tokens": limit}
            answer = whole(server, **fields)
            assert answer["message"] == {"role": "assistant", "content": None, "refusal": None}
            assert answer["finish_reason"] == "length"
            assert joined(events(ask(server, stream=True, **fields))) == {}


def test_marker_without_a_call_shows_only_where_no_limit_has_cut_it(server: HttpServer) -> None:
    """It is what the model has to say, or the beginning of what it had to say."""
    server.engine.answer = text_as_answer('Well. <tool_call>\n{"name": "get')
    message = whole(server)["message"]
    assert message["content"] == 'Well. <tool_call>\n{"name": "get'

    for is_streamed in (False, True):
        response = ask(server, max_tokens=len('Well. <tool_call>\n{"na'), stream=is_streamed)
        said = joined(events(response)) if is_streamed else response.json()["choices"][0]["message"]
        assert said["content"].strip() == "Well."


def test_tools_can_be_switched_off_and_parsers_named() -> None:
    """Off: a 400 that says how to turn it on. A name counts more than the template."""
    with serving(chat_template=TEMPLATE, tool_call_parser=None) as server:
        response = server.chat(tools=[TIME])
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "--tool-call-parser" in message
    assert all(name in message for name in FAMILIES)

    answer = text_as_answer("[get_time()]")
    with serving(answer, chat_template=TEMPLATE, tool_call_parser="pythonic") as server:
        assert whole(server)["message"]["tool_calls"][0]["function"]["name"] == "get_time"
