"""POST /v1/responses, whole and streamed, with computed answers."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.wire import FinishReason
from tests.helpers.fake_engine import endless_answer, prompt_as_answer, text_as_answer
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.responses import (
    ANSWER,
    CALL,
    TEMPLATE,
    TIME,
    WEATHER,
    LateFailure,
    ask,
    kinds,
    respond,
    shown,
    stream,
    stream_in_two,
    text_of,
)

THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
    "encrypted_content": None,
    "status": "completed",
}
MESSAGE = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
    "status": "completed",
}
WEATHER_CALL = {
    "type": "function_call",
    "name": "get_weather",
    "arguments": '{"city": "Köln 🙂"}',
    "status": "completed",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE, reasoning_parser="auto") as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    """A server whose model repeats its prompt; tests may change that."""
    shared.engine.answer = prompt_as_answer
    shared.engine.step_s = 0.0
    return shared


def prompt(server: HttpServer, **fields: Any) -> str:
    """What the model sees."""
    return text_of(ask(server, **fields))


# ------------------------------------------------------------------------------------ answers


def test_whole_response_has_openai_fields(server: HttpServer) -> None:
    """All of them, with the request's values where it has any."""
    server.engine.answer = text_as_answer("Hello")

    response = ask(server, instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, user="u")

    ids = response.pop("id"), response["output"][0].pop("id")
    assert [each.split("_")[0] for each in ids] == ["resp", "msg"]
    created_at, completed_at = response.pop("created_at"), response.pop("completed_at")
    assert 1_700_000_000 < created_at <= completed_at
    assert response == {
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "m",
        "object": "response",
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
                ],
                "status": "completed",
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": len("<system>Be brief.<user>hi<assistant>"),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len("Hello") + 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 42,
        },
        "user": "u",
    }


def test_thoughts_texts_and_calls_are_items(server: HttpServer) -> None:
    """In the order in which the model wrote them."""
    server.engine.answer = text_as_answer(ANSWER)

    response = ask(server, tools=[WEATHER, TIME])

    assert shown(response) == [THOUGHT, MESSAGE, WEATHER_CALL]
    ids = [item["id"] for item in response["output"]]
    assert [each.split("_")[0] for each in ids] == ["rs", "msg", "fc"]
    assert response["output"][2]["call_id"].startswith("call_")
    assert response["tools"] == [WEATHER, TIME]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_stream_tells_each_change_once(server: HttpServer) -> None:
    """Each item from its beginning to its end, then the response; numbered from 0 on."""
    server.engine.answer = text_as_answer(ANSWER)

    found = stream(server, tools=[WEATHER])

    assert kinds(found) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    first, last = found[0]["response"], found[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert shown(last) == [THOUGHT, MESSAGE, WEATHER_CALL]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == last["output"]


@pytest.mark.parametrize("text", ["Hello", ANSWER, "", CALL[:40], f"{CALL}{CALL} Done. \n"])
def test_stream_ends_with_the_whole_response(server: HttpServer, text: str) -> None:
    """And its deltas, joined, are the texts of that."""
    server.engine.answer = text_as_answer(text)
    whole = ask(server, tools=[WEATHER])

    found = stream(server, tools=[WEATHER])

    last = found[-1]["response"]
    assert shown(last) == shown(whole)
    assert last["usage"] == whole["usage"]
    pieces: dict[str, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
    for item in last["output"]:
        written = item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
        assert pieces.get(item["id"], "") == written


def test_empty_answer_is_an_empty_message(server: HttpServer) -> None:
    """Clients read the text of the first item."""
    server.engine.answer = text_as_answer("")

    response = ask(server)

    assert [item["type"] for item in response["output"]] == ["message"]
    assert text_of(response) == ""
    assert "output_text.delta" not in kinds(stream(server))


def test_token_limit_makes_a_response_incomplete(server: HttpServer) -> None:
    """And the item that it has cut off; also in a stream, which then ends with another event."""
    server.engine.answer = endless_answer

    response = ask(server, max_output_tokens=5)
    found = stream(server, max_output_tokens=5)

    for each in (response, found[-1]["response"]):
        assert each["status"] == "incomplete"
        assert each["incomplete_details"] == {"reason": "max_output_tokens"}
        assert each["output"][0]["status"] == "incomplete"
        assert (text_of(each), each["completed_at"]) == ("abcde", None)
    assert found[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_call_that_a_limit_cuts_at_its_beginning_is_no_text(
    server: HttpServer, choice: str
) -> None:
    """Whole and streamed."""
    server.engine.answer = text_as_answer('<tool_call>\n{"name": "get_time", "arguments": {}}')
    fields = {"tools": [TIME], "tool_choice": choice, "max_output_tokens": len("<tool_call>\n{")}

    for response in (ask(server, **fields), stream(server, **fields)[-1]["response"]):
        assert (response["status"], text_of(response)) == ("incomplete", "")


def test_limit_beyond_the_model_is_the_models(server: HttpServer) -> None:
    """It is an upper bound, as in OpenAI's API: not a wish for so many tokens."""
    server.engine.answer = endless_answer

    response = ask(server, max_output_tokens=100_000)

    assert response["usage"]["total_tokens"] == 1000
    assert response["status"] == "incomplete"


def test_logprobs_are_those_of_the_text(server: HttpServer) -> None:
    """With as many alternatives as asked for, whole and streamed; the thoughts' are left out."""
    server.engine.answer = text_as_answer("<think>a</think>bc")
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}

    whole = ask(server, **fields)
    found = stream(server, **fields)

    [part] = whole["output"][1]["content"]
    assert [each["token"] for each in part["logprobs"]] == ["b", "c"]
    assert part["logprobs"][0]["bytes"] == [98]
    assert [each["token"] for each in part["logprobs"][0]["top_logprobs"]] == ["a"]
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == part["logprobs"]


# ------------------------------------------------------------------------------------- requests


def test_items_become_the_messages_of_the_template(server: HttpServer) -> None:
    """A thought, a text and calls are one message; a result names its call."""
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Obey."}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
        {"type": "message", "role": "user", "content": "And?"},
    ]

    assert prompt(server, instructions="Be brief.", input=items, tool_choice="none") == (
        "<system>Be brief.\n\nObey.<user>Weather?<assistant><think>Hm.</think>Wait."
        '<tool_call>{"name": "get_time", "arguments": {"a": 1}}</tool_call>'
        "<tool>12:00<user>And?<assistant>"
    )


def test_output_may_be_sent_back_as_it_is(server: HttpServer) -> None:
    """What clients do that keep conversations themselves."""
    server.engine.answer = text_as_answer(ANSWER)
    output = ask(server, tools=[WEATHER], store=False)["output"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "rain"}
    server.engine.answer = prompt_as_answer

    seen = prompt(server, input=[{"role": "user", "content": "hi"}, *output, result])

    assert seen == (
        "<user>hi<assistant><think>Hm.</think>Let me see."
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln 🙂"}}</tool_call>'
        "<tool>rain<assistant>"
    )


def test_thoughts_can_be_carried_packed(server: HttpServer) -> None:
    """As clients do that know `encrypted_content` only."""
    server.engine.answer = text_as_answer(ANSWER)
    fields = {"include": ["reasoning.encrypted_content"], "store": False, "tools": [WEATHER]}
    whole, found = ask(server, **fields), stream(server, **fields)
    thought, message, _ = whole["output"]
    del thought["content"]
    server.engine.answer = prompt_as_answer

    seen = prompt(server, input=[{"role": "user", "content": "hi"}, thought, message])

    assert seen == "<user>hi<assistant><think>Hm.</think>Let me see.<assistant>"
    packed = found[-1]["response"]["output"][0]["encrypted_content"]
    assert packed == thought["encrypted_content"]


def test_tools_reach_the_template_as_in_chat(server: HttpServer) -> None:
    """A layer deeper than clients of this route send them."""
    seen = prompt(server, tools=[TIME])
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": [TIME]}

    assert seen == (
        '<tools>{"type": "function", "function": {"name": "get_time"}}<user>hi<assistant>'
    )
    assert prompt(server, tools=[WEATHER, TIME], tool_choice=chosen) == seen
    assert prompt(server, tools=[TIME], tool_choice="none") == "<user>hi<assistant>"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
        {"tools": [TIME], "tool_choice": "required"},
        {"tools": [TIME, WEATHER], "tool_choice": {"type": "function", "name": "get_time"}},
        {"tools": [{**WEATHER, "strict": True}]},
    ],
)
def test_what_must_be_is_bound_by_a_grammar(server: HttpServer, fields: dict[str, Any]) -> None:
    """The form of a text, and calls; `test_structured_output` shows what comes of it."""
    response = ask(server, **fields)

    params = server.engine.received[-1].sampling_params
    assert params is not None
    assert params.structured_output is not None
    assert all(response[name] == value for name, value in fields.items())


def test_reasoning_effort_reaches_the_template(server: HttpServer) -> None:
    """What changes nothing is named in a header."""
    answer = respond(server, reasoning={"effort": "low", "summary": "auto"})

    assert text_of(answer.json()) == "<user>hi<assistant>[low]"
    assert answer.json()["reasoning"] == {"effort": "low", "summary": "auto"}
    assert answer.headers["x-raywire-ignored"] == "reasoning.summary"
    assert respond(server, new_field=1).headers["x-raywire-ignored"] == "new_field"


def test_auto_truncation_leaves_out_the_oldest_turns(server: HttpServer) -> None:
    """As few as must be, with what belongs to them; never the instructions, nor the last turn."""
    turns = [
        {"role": "user", "content": "a" * 500},
        {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "b" * 200},
        {"role": "user", "content": "c" * 300},
        {"role": "assistant", "content": "d" * 100},
        {"role": "user", "content": "e" * 200},
    ]
    fields: dict[str, Any] = {"input": turns, "instructions": "Obey.", "truncation": "auto"}

    def seen(max_output_tokens: int) -> str:
        ask(server, max_output_tokens=max_output_tokens, **fields)
        token_ids = server.engine.received[-1].prompt_token_ids
        assert token_ids is not None
        return bytes(token_ids.tolist()).decode()

    rest = f"{'c' * 300}<assistant>{'d' * 100}<user>{'e' * 200}<assistant>"
    assert seen(5) == f"<system>Obey.<user>{rest}"
    assert seen(500) == f"<system>Obey.<user>{'e' * 200}<assistant>"
    assert seen(10_000) == f"<system>Obey.<user>{rest}"
    response = ask(server, max_output_tokens=5, **fields)
    assert response["truncation"] == "auto"
    kept = server.http.get(f"/v1/responses/{response['id']}/input_items").json()["data"]
    assert len(kept) == len(turns)


def test_sampling_fields_reach_the_engine(server: HttpServer) -> None:
    """OpenAI's, and vLLM's additions."""
    ask(server, temperature=0.25, top_p=0.5, top_k=7, seed=3, max_output_tokens=9, min_p=0.1)

    params = server.engine.received[-1].sampling_params
    assert params is not None
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
    assert (params.seed, params.max_tokens, params.min_p) == (3, 9, 0.1)


def test_seed_minus_one_is_none(server: HttpServer) -> None:
    """As in a chat."""
    ask(server, seed=-1)

    params = server.engine.received[-1].sampling_params
    assert params is not None
    assert params.seed is None


def test_requests_with_one_cache_key_share_a_rank() -> None:
    """It is where their prefix is cached."""
    with serving(num_engines=4) as server:
        routes = [
            respond(server, input=f"{i} is new", prompt_cache_key="k").headers["x-raywire-route"]
            for i in range(4)
        ]

    assert len({route.partition(";")[0] for route in routes}) == 1
    assert all("rule=session" in route for route in routes[1:])


def test_stop_strings_work(server: HttpServer) -> None:
    """They are no field of OpenAI's here, but of vLLM's."""
    server.engine.answer = endless_answer

    response = ask(server, stop="fg")

    assert (text_of(response), response["status"]) == ("abcde", "completed")
    server.wait_idle()


# --------------------------------------------------------------------------------------- errors

NO_TOOL = {"type": "function", "name": "other"}
BROKEN = {**WEATHER, "name": "f", "strict": True, "parameters": {"properties": {"a": {"type": 1}}}}
ONLY_BROKEN = {"type": "allowed_tools", "mode": "required", "tools": [BROKEN]}
MISSING = ("model", "previous_response_id", "input[0].id")
BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": 5}, "input", "required"),
    ({"input": ""}, "input", "empty"),
    ({"input": []}, "input", "empty"),
    ({"input": [5]}, "input[0]", "object"),
    ({"input": [{"role": "user"}]}, "input[0].content", "text"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "one of"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "text parts"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "input_image",
    ),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "computer_call"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "no item 'x'"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name", "characters"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input",
        "no such function_call",
    ),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input", "4096"),
    ({"input": "x" * 1001}, "input", "tokens"),
    ({"model": "other"}, "model", "other"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"top_p": 2}, "top_p", "top_p"),
    ({"top_logprobs": 21}, "top_logprobs", "20"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"max_output_tokens": True}, "max_output_tokens", "bool"),
    ({"include": ["everything"]}, "include[0]", "one of"),
    ({"reasoning": {"effort": "lots"}}, "reasoning.effort", "one of"),
    ({"truncation": "auto", "input": "x" * 1001}, "input", "tokens"),
    ({"truncation": "maybe"}, "truncation", "one of"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
    ({"user": "x" * 513}, "user", "512"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [TIME, {"type": "mcp", "server_label": "x"}]}, "tools[1].type", "mcp"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "characters"),
    ({"tools": [TIME], "tool_choice": NO_TOOL}, "tool_choice", "other"),
    ({"tools": [TIME], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "file_search"),
    (
        {
            "tools": [TIME],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NO_TOOL]},
        },
        "tool_choice.tools",
        "other",
    ),
    ({"tools": [TIME, BROKEN]}, "tools[1].parameters.properties.a.type", "tools[1].parameters"),
    (
        {"tools": [TIME, BROKEN], "tool_choice": ONLY_BROKEN},
        "tools[1].parameters.properties.a.type",
        "tools[1].parameters",
    ),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "required"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema",
        "required",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}},
        "text.format.schema.type",
        "'no'",
    ),
    ({"text": {"verbosity": "high"}}, "text.verbosity", "instructions"),
    ({"stream_options": {}}, "stream_options", "stream"),
    ({"background": True, "store": False}, "background", "store"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages", "send input"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
    ({"n": 2}, "n", "several times"),
    ({"priority": 1}, "priority", "--scheduling-policy"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "resp_1"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_bad_requests_name_the_field(
    server: HttpServer, fields: dict[str, Any], param: str | None, words: str
) -> None:
    """In OpenAI's shape; the engine never sees them, streamed or not."""
    num_received = len(server.engine.received)
    for more in ({}, {"stream": True}):
        if "stream_options" in fields:
            more = {}
        answer = respond(server, **fields, **more)
        error = answer.json()["error"]
        assert answer.status_code == (404 if param in MISSING else 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]
    assert len(server.engine.received) == num_received


def test_error_before_the_first_byte_is_a_plain_one(server: HttpServer) -> None:
    """Also of a stream."""
    server.engine.answer = lambda request: [FinishReason.ERROR]
    for is_streamed in (False, True):
        answer = respond(server, stream=is_streamed)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "request_failed"


def test_error_after_the_first_byte_is_the_last_event(server: HttpServer) -> None:
    """It has the response as far as it came."""
    server.engine.answer = failure = LateFailure("H")

    found = stream_in_two(server, failure.fail)

    response = found[-1]["response"]
    assert found[-1]["type"] == "response.failed"
    assert response["status"] == "failed"
    assert response["error"] == {
        "code": "server_error",
        "message": "the computed answer says so",
    }
    assert text_of(response) == "H"
    assert response["output"][0]["status"] == "incomplete"


class _GoneError(Exception):
    """The client has had enough."""


def test_client_that_goes_away_ends_its_response(server: HttpServer) -> None:
    """Streamed or not, the engine hears of it; and nothing of it is kept."""
    server.engine.answer = endless_answer
    server.engine.step_s = 0.005
    names: list[str] = []

    def leave(name: str) -> None:
        names.append(name)
        raise _GoneError

    with pytest.raises(_GoneError):
        stream_in_two(server, leave)
    server.wait_idle()
    server.engine.is_paused = True
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/responses", json={"model": "m", "input": "hi"}, timeout=0.1)
    server.wait_idle()
    server.engine.is_paused = False

    assert server.http.get(f"/v1/responses/{names[0]}").status_code == 404
    assert len(server.engine.aborted) >= 2


def test_metrics_count_responses(server: HttpServer) -> None:
    """Like any other request; and what is kept of them."""
    samples = (
        'raywire:request_success_total{engine="0",finished_reason="stop",model_name="m"}',
        "raywire:responses_stored",
        "raywire:responses_stored_bytes",
        "raywire:responses_in_background",
    )
    before = [server.metric(sample) for sample in samples]

    ask(server)

    success, stored, stored_bytes, background = (server.metric(sample) for sample in samples)
    assert success == before[0] + 1
    assert stored == before[1] + 1
    assert stored_bytes > before[2] + 1000
    assert background == before[3] == 0
