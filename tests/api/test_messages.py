"""POST /v1/messages, whole and streamed, with computed answers."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.wire import EngineCoreRequest, FinishReason
from tests.helpers.anthropic_stream import TEMPLATE, joined, stream_events
from tests.helpers.fake_engine import endless_answer, prompt_as_answer, text_as_answer
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.message_events import TOOLS

HI = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {"name": "get_weather", "input_schema": TOOLS["get_weather"]}
TIME: dict[str, Any] = {"name": "get_time", "description": "Now", "input_schema": {}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
CALLS = f'{CALL}\n<tool_call>{{"name": "get_time", "arguments": {{}}}}</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE, reasoning_parser="auto") as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    """A server whose model says the prompt again; tests may change that."""
    shared.engine.answer = prompt_as_answer
    shared.engine.num_cached_tokens = 0
    shared.engine.received.clear()
    return shared


def post(server: HttpServer, content: Any = "hi", **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    body = {"model": "m", "max_tokens": 400, "messages": messages, **fields}
    return server.http.post(
        "/v1/messages", json=body, headers={"anthropic-version": "2023-06-01", "x-api-key": "k"}
    )


def whole(server: HttpServer, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    response = post(server, content, **fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def streamed(server: HttpServer, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    """The message that the events add up to."""
    response = post(server, content, stream=True, **fields)
    assert response.status_code == 200, response.text
    return joined(stream_events(response))


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    said = {name: value for name, value in message.items() if name != "id"}
    return said | {
        "content": [{k: v for k, v in block.items() if k != "id"} for block in said["content"]]
    }


def test_message_has_anthropics_shape(server: HttpServer) -> None:
    """All keys that clients look for; the prompt is what was read anew and what was cached."""
    server.engine.num_cached_tokens = 4

    message = whole(server, "hi", model="alias")

    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "alias",
        "content": [{"type": "text", "text": "<user>hi<assistant>"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 15,
            "output_tokens": 20,
            "cache_read_input_tokens": 4,
            "cache_creation_input_tokens": 0,
        },
    }


def test_stream_has_anthropics_events(server: HttpServer) -> None:
    """In their order, each named by its type; and no `[DONE]`, which its clients do not know."""
    server.engine.answer = text_as_answer("So")

    response = post(server, stream=True)
    start, *events = stream_events(response)

    assert response.headers["content-type"].startswith("text/event-stream")
    message, end = start.pop("message"), events[-2]
    assert message.pop("id").startswith("msg_")
    assert message.pop("usage") | {"output_tokens": 3} == end.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    begun = {"type": "content_block_start", "index": 0}
    delta = {"type": "content_block_delta", "index": 0}
    assert merged(events) == [
        {"type": "ping"},
        {**begun, "content_block": {"type": "text", "text": ""}},
        {**delta, "delta": {"type": "text_delta", "text": "So"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}},
        {"type": "message_stop"},
    ]


def merged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the texts that follow each other joined: how they come is a matter of time."""
    found: list[dict[str, Any]] = []
    for event in events:
        if found and found[-1]["type"] == event["type"] == "content_block_delta":
            found[-1]["delta"]["text"] += event["delta"]["text"]
        else:
            found.append(event)
    return found


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        ("Köln 🙂, 東京", {}),
        ("", {}),
        (f"Let me see.\n{CALLS}\nDone.", {"tools": [WEATHER, TIME]}),
        (f"<think>\nA city?\n</think>\n\nWell.\n{CALL}", {"tools": [WEATHER]}),
        ("<think>only thoughts", {}),
        (CALLS, {"tools": [WEATHER, TIME], "tool_choice": {"type": "auto"}}),
        ("one two STOP three", {"stop_sequences": ["STOP"]}),
        (f"{CALL} and STOP", {"tools": [WEATHER], "stop_sequences": ["STOP"]}),
        ("abcdef", {"max_tokens": 3}),
    ],
)
def test_a_stream_adds_up_to_the_message(
    server: HttpServer, answer: str, fields: dict[str, Any]
) -> None:
    """Whatever kinds of blocks it has."""
    server.engine.answer = text_as_answer(answer)

    assert without_ids(streamed(server, **fields)) == without_ids(whole(server, **fields))


def test_a_model_of_which_nothing_is_looked_for_says_text() -> None:
    """Markers included; the events add up to the message, character by character."""
    text = "<think>é🙂</think> 東京 <tool_call>{}"
    with serving(text_as_answer(text)) as server:
        message = whole(server)

        assert message["content"] == [{"type": "text", "text": text}]
        assert without_ids(streamed(server)) == without_ids(message)


def test_thoughts_text_and_calls_are_blocks(server: HttpServer) -> None:
    """In the order in which the model has written them; each call with an id of its own."""
    server.engine.answer = text_as_answer(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALLS}")

    message = streamed(server, tools=[WEATHER, TIME])

    thought, text, *calls = message["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert text == {"type": "text", "text": "Let me see."}
    assert len({call.pop("id") for call in calls}) == 2
    assert calls == [
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln 🙂"}},
        {"type": "tool_use", "name": "get_time", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


def test_the_model_sees_tools_as_in_chat(server: HttpServer) -> None:
    """Under the names of the other API, which templates know; none are shown with `none`."""
    shown = {"type": "function", "function": {"name": "get_time", "description": "Now"}}
    shown["function"]["parameters"] = {}  # type: ignore[index]

    message = whole(server, tools=[{**TIME, "cache_control": {"type": "ephemeral"}}])
    hidden = whole(server, tools=[TIME], tool_choice={"type": "none"})

    assert message["content"][0]["text"] == f"<tools>{json.dumps(shown)}<user>hi<assistant>"
    assert hidden["content"][0]["text"] == "<user>hi<assistant>"


def test_calls_can_be_kept_to_one(server: HttpServer) -> None:
    """Further ones are dropped."""
    server.engine.answer = text_as_answer(CALLS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}

    for ask in (whole, streamed):
        content = ask(server, tools=[WEATHER, TIME], tool_choice=choice)["content"]
        assert [block["name"] for block in content] == ["get_weather"]


@pytest.mark.parametrize("choice", ["auto", "any"])
def test_call_that_a_limit_cuts_at_its_beginning_is_no_text(
    server: HttpServer, choice: str
) -> None:
    """Neither beside a call that is whole."""
    server.engine.answer = text_as_answer(CALLS)
    for length, num_calls in ((len("<tool_call>\n{"), 0), (len(CALL.encode()) - 2, 1)):
        fields = {"tools": [WEATHER, TIME], "tool_choice": {"type": choice}, "max_tokens": length}
        for ask in (whole, streamed):
            content = ask(server, **fields)["content"]
            assert [block["type"] for block in content] == ["tool_use"] * num_calls


@pytest.mark.parametrize(
    ("arguments", "input_"),
    [
        ("{", {"INVALID_JSON": "{"}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("{}", {}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
    ],
)
def test_input_that_is_no_object_is_shown_as_such(
    server: HttpServer, arguments: str, input_: dict[str, Any]
) -> None:
    """In a message: an input is an object. A stream has it as the model has written it."""
    server.engine.answer = text_as_answer(
        f'<tool_call>{{"name": "get_time", "arguments": {arguments}'
    )

    [block] = whole(server, tools=[TIME])["content"]

    assert block["input"] == input_


def test_stop_sequence_is_named(server: HttpServer) -> None:
    """It is not in the text, and its call is not to be run if it is cut off."""
    server.engine.answer = text_as_answer("one two STOP three")
    message = whole(server, stop_sequences=["no", "STOP"])
    assert message["content"] == [{"type": "text", "text": "one two "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")

    server.engine.answer = text_as_answer(CALL)
    for ask in (whole, streamed):
        # In a stream the input is as far as it came.
        text = "🙂" if ask is whole else "\n</tool_call"
        message = ask(server, tools=[WEATHER], stop_sequences=[text])
        reason = ("stop_sequence", text) if ask is whole else ("tool_use", None)
        assert (message["stop_reason"], message["stop_sequence"]) == reason


def test_the_end_says_whose_limit_it_was(server: HttpServer) -> None:
    """The request's, or the model's length: a client that asks for more than there is room for,
    as coding agents do, gets what there is."""
    server.engine.answer = endless_answer

    assert whole(server, max_tokens=5)["stop_reason"] == "max_tokens"
    message = whole(server, max_tokens=32_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == 1000 - len("<user>hi<assistant>")
    assert whole(server, max_tokens=981)["stop_reason"] == "max_tokens"


def test_thinking_is_the_templates_business(server: HttpServer) -> None:
    """Told in the words that templates have for it; what a request says itself comes first."""

    def prompt(**fields: Any) -> str:
        asked = post_render(server, **fields)
        return str(asked["prompt_text"]).removeprefix("<user>hi<assistant>")

    enabled = {"type": "enabled", "budget_tokens": 100}
    assert prompt() == ""
    assert prompt(thinking=enabled) == "<think>\n"
    assert prompt(thinking={"type": "adaptive"}) == "<think>\n"
    assert prompt(thinking={"type": "disabled"}) == "<think></think>"
    wish = {"enable_thinking": False}
    assert prompt(thinking=enabled, chat_template_kwargs=wish) == "<think></think>"
    assert prompt(output_config={"effort": "low"}) == "low"
    assert prompt(output_config={"effort": "low"}, thinking=enabled) == "low<think>\n"


def post_render(server: HttpServer, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "m",
        "max_tokens": 400,
        "messages": HI,
        **fields,
    }
    response = server.http.post("/v1/messages/render", json=body)
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()
    return shown


def test_thoughts_can_be_left_out(server: HttpServer) -> None:
    """Where they were not asked for, or are not to be shown; they count all the same."""
    server.engine.answer = text_as_answer("<think>Hm.</think>So.")

    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        message = whole(server, thinking=thinking)
        assert message["content"] == [{"type": "text", "text": "So."}]
        assert message["usage"]["output_tokens"] == 22


def test_parameters_reach_the_engine(server: HttpServer) -> None:
    """Under their own names; all others are the defaults."""
    whole(server, temperature=0.5, top_p=0.25, top_k=7, max_tokens=9, cache_salt="s")

    [request] = server.engine.received
    params = request.sampling_params
    assert params is not None
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.25, 7, 9)
    assert request.cache_salt == "s"


def test_the_last_message_may_begin_the_answer(server: HttpServer) -> None:
    """The answer goes on where it ends."""
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]

    assert post_render(server, messages=begun)["prompt_text"] == "<user>hi<assistant>I say"


def test_tokens_are_counted_without_an_answer(server: HttpServer) -> None:
    """With system, tools and all; also where there are too many for the model."""

    def count(**fields: Any) -> int:
        body = {"model": "m", "messages": HI, **fields}
        response = server.http.post("/v1/messages/count_tokens", json=body)
        assert response.status_code == 200, response.text
        assert list(response.json()) == ["input_tokens"]
        return int(response.json()["input_tokens"])

    plain = len("<user>hi<assistant>")
    assert count() == plain
    assert count(system="be kind") == plain + len("<system>be kind")
    assert count(tools=[TIME]) > plain + 40
    assert count(messages=[{"role": "user", "content": "x" * 1200}]) == plain - 2 + 1200
    assert server.engine.received == []


def test_hints_are_accepted_and_others_named(server: HttpServer) -> None:
    """What coding agents send along: caches, bookkeeping. What would change the answer and does
    not is said in a header."""
    response = post(
        server,
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        thinking={"type": "enabled", "budget_tokens": 100},
        context_management={"edits": []},
        container=None,
    )

    assert response.status_code == 200
    assert response.headers["x-raywire-ignored"].split(",") == [
        "context_management",
        "thinking.budget_tokens",
    ]


def test_responses_have_the_id_that_its_clients_read(server: HttpServer) -> None:
    """Theirs and ours are the same; errors have it in their body too."""
    good, bad = post(server), post(server, temperature=-1)

    assert good.headers["request-id"] == good.headers["x-request-id"]
    assert bad.json()["request_id"] == bad.headers["request-id"]
    assert "request-id" not in server.chat().headers


def test_a_failure_before_the_first_byte_is_an_http_error(server: HttpServer) -> None:
    """As on every route."""
    server.engine.answer = lambda request: [FinishReason.ERROR]

    for is_streamed in (True, False):
        response = post(server, stream=is_streamed)
        assert response.status_code == 500
        assert response.json()["error"] == {
            "type": "api_error",
            "message": "the computed answer says so",
        }


def test_a_failure_after_it_is_an_event_and_the_end(server: HttpServer) -> None:
    """In the same shape, and no `message_stop`: the message is not whole."""
    has_begun = threading.Event()

    def answer(request: EngineCoreRequest) -> Iterator[int | FinishReason]:
        yield 97
        assert has_begun.wait(20)
        yield FinishReason.ERROR

    server.engine.answer = answer
    body = {"model": "m", "max_tokens": 9, "messages": HI, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start"
        has_begun.set()
        *_, name, data, end = lines

    assert (name, end) == ("event: error", "")
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "the computed answer says so"},
        "request_id": response.headers["request-id"],
    }


def test_requests_are_counted_as_those_of_chat(server: HttpServer) -> None:
    """In the same metrics."""
    sample = 'raywire:request_success_total{engine="0",finished_reason="stop",model_name="m"}'
    before = server.metric(sample)

    whole(server)
    streamed(server)

    assert server.metric(sample) == before + 2
