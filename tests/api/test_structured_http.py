"""Structured output and calls that must be made, over HTTP: the model is a random walk through what
the engine is asked to enforce, so whatever a model could write is what a client gets."""

import itertools
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from engine.structured_output import StructuredOutput
from engine.wire import EngineCoreRequest
from tests.helpers import byte_folder
from tests.helpers.broken_schemas import BROKEN_SCHEMAS
from tests.helpers.byte_folder import END
from tests.helpers.grammar_walk import Language
from tests.helpers.http_server import HttpServer, events, serving
from tests.helpers.message_events import TOOLS

TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}\
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if thinking is true %}<think>
{% elif thinking is false %}<think></think>{% endif %}{% endif %}"""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
}
AS_PERSON = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": PERSON},
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": TOOLS["get_weather"]},
}
TIME = {"type": "function", "function": {"name": "get_time"}}
BOTH = [WEATHER, TIME]
LONG: dict[str, Any] = {"engine_options": {"max_model_len": 20_000}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Walk:
    """The answer of a model that does what it must, and otherwise anything."""

    def __init__(self) -> None:
        self.asked: list[StructuredOutput | None] = []
        self._seeds = itertools.count()

    def __call__(self, request: EngineCoreRequest) -> Iterator[int]:
        assert request.sampling_params is not None
        output = request.sampling_params.structured_output
        self.asked.append(output)
        text = "" if output is None else language(output).any_text(next(self._seeds))
        yield from text.encode()
        yield END


@cache
def language(output: StructuredOutput) -> Language:
    endings = ("</think>", "</think>\n\n", '"', '"}', "}")
    return Language(output, byte_tokenizer(), endings)


@cache
def byte_tokenizer() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = byte_folder.make(Path(folder) / "bytes")
        return Tokenizer.from_file(str(made / "tokenizer.json"))


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE, reasoning_parser="auto", **LONG) as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    shared.engine.answer = Walk()
    return shared


@pytest.fixture(scope="module")
def plain() -> Iterator[HttpServer]:
    """A server whose model's template shows neither calls nor thoughts."""
    with serving(**LONG) as server:
        yield server


def asked(server: HttpServer) -> list[StructuredOutput | None]:
    assert isinstance(server.engine.answer, Walk)
    return server.engine.answer.asked


def content(response: httpx.Response, index: int = 0) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][index]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert isinstance(text, str)
    return text


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ({"response_format": AS_PERSON}, PERSON),
    ({"structured_outputs": {"json": PERSON}}, PERSON),
    ({"guided_json": json.dumps(PERSON)}, PERSON),
]


@pytest.mark.parametrize(("fields", "schema"), FORMS)
def test_answer_has_the_form_that_was_asked_for(
    server: HttpServer, fields: dict[str, Any], schema: dict[str, Any]
) -> None:
    """In chats and completions, each choice of several, whole and streamed."""
    for path in ("completions", "chat/completions"):
        body = {"model": "m", "n": 2, "max_tokens": 2000, **fields}
        body |= {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
        response = server.http.post(f"/v1/{path}", json=body)
        for index in range(2):
            jsonschema.validate(json.loads(content(response, index)), schema)

        stream = events(server.http.post(f"/v1/{path}", json={**body, "stream": True}))
        for index in range(2):
            jsonschema.validate(json.loads(streamed(stream, index)), schema)


MESSAGES = [{"role": "user", "content": "hi"}]


def streamed(chunks: list[Any], index: int) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize("thinking", [True, False, None])
def test_format_holds_for_what_follows_the_thought(
    server: HttpServer, thinking: bool | None
) -> None:
    """Whether the prompt has opened one, has closed it, or leaves it to the model."""
    kwargs = {} if thinking is None else {"thinking": thinking}
    response = server.chat(
        response_format=AS_PERSON, max_tokens=4000, chat_template_kwargs=kwargs, n=3
    )

    for index in range(3):
        jsonschema.validate(json.loads(content(response, index)), PERSON)
    (output,) = {each for each in asked(server) if each is not None}
    assert output.kind == ("json_schema" if thinking is False else "lark")


@pytest.mark.parametrize("stream", [False, True])
def test_call_is_made_where_it_must_be(server: HttpServer, stream: bool) -> None:
    """With valid arguments, without content, and with OpenAI's finish reasons: `tool_calls`, but
    `stop` for a tool that was named."""
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        fields: dict[str, Any] = {"tools": BOTH, "tool_choice": choice, "max_tokens": 4000, "n": 2}
        response = server.chat(**fields, stream=stream)
        messages = joined(response) if stream else response.json()["choices"]
        for each in messages:
            calls = each["message"]["tool_calls"]
            assert each["finish_reason"] == reason
            assert not each["message"].get("content")
            for call in calls:
                name = call["function"]["name"]
                schema = {"get_weather": TOOLS["get_weather"], "get_time": {"maxProperties": 0}}
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema[name])
            if choice is NAMED:
                assert [call["function"]["name"] for call in calls] == ["get_weather"]


def joined(response: httpx.Response) -> list[dict[str, Any]]:
    """The choices that a client puts together from a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in (c for chunk in events(response) for c in chunk["choices"]):
        choice = choices.setdefault(piece["index"], {"message": {"content": "", "tool_calls": []}})
        choice["finish_reason"] = piece["finish_reason"]
        choice["message"]["content"] += piece["delta"].get("content", "")
        calls = choice["message"]["tool_calls"]
        for call in piece["delta"].get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "function": {"name": "", "arguments": ""}})
            for name, text in call["function"].items():
                calls[call["index"]]["function"][name] += text
    return [choices[index] for index in sorted(choices)]


def test_one_call_where_calls_may_not_be_parallel(server: HttpServer) -> None:
    """By the grammar: nothing is thrown away."""
    response = server.chat(
        tools=BOTH, tool_choice="required", parallel_tool_calls=False, max_tokens=4000, n=4
    )

    for choice in response.json()["choices"]:
        assert len(choice["message"]["tool_calls"]) == 1


def test_call_can_be_required_of_a_model_that_shows_none(plain: HttpServer) -> None:
    """As a list in JSON, as in vLLM; where it may choose, tools are refused as before."""
    plain.engine.answer = Walk()

    response = plain.chat(tools=BOTH, tool_choice=NAMED, max_tokens=4000)
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]

    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS["get_weather"])
    assert plain.chat(tools=BOTH).status_code == 400


def test_tools_that_are_not_strict_leave_the_model_free(server: HttpServer) -> None:
    """No grammar, no cost; one strict tool, and calls are bound."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}

    server.chat(tools=BOTH, max_tokens=10)
    server.chat(tools=[strict, TIME], max_tokens=10)
    server.chat(tools=[strict, TIME], tool_choice="none", max_tokens=10)

    free, bound, none = asked(server)
    assert free is None
    assert none is None
    assert bound is not None
    assert bound.kind == "lark"


BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}},
        f"response_format.json_schema.schema{place}",
    )
    for s, place in (
        ({"type": "banana"}, ".type"),
        ({"properties": {"a": "string"}}, ".properties.a"),
        ({"$ref": "#/nowhere"}, ".$ref"),
        ("", ""),
    )
] + [
    ({"structured_outputs": {"grammar": "   "}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {"enum": list(range(9999))}}}, "structured_outputs.json.enum"),
    ({"guided_json": {"type": "string", "maxLength": 10**9}}, "guided_json.maxLength"),
    ({"response_format": AS_PERSON, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "use_beam_search": True}, "response_format"),
]


@pytest.mark.row("S-23")
@pytest.mark.parametrize(("fields", "param"), BROKEN)
@pytest.mark.parametrize("stream", [False, True])
def test_broken_wish_is_a_400_by_name(
    server: HttpServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    """At once, also where a stream was asked for, and the engine never hears of it (bug reports F01
    and F04)."""
    stream = stream and "use_beam_search" not in fields
    for ask in (server.chat, server.complete):
        more = {"prompt": "x"} if ask == server.complete else {}
        began = time.perf_counter()
        response = ask(**fields, **more, stream=stream)
        assert time.perf_counter() - began < 2.0
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert asked(server) == []


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"parameters": schema}, f"tools[1].function.parameters{place}")
        for schema, place in BROKEN_SCHEMAS
    ),
    ({"name": "no spaces"}, "tools[1].function.name"),
]


@pytest.mark.row("S-24")
@pytest.mark.parametrize(("change", "param"), BAD_TOOLS)
def test_broken_tool_is_a_400_where_calls_are_enforced(
    server: HttpServer, change: dict[str, Any], param: str
) -> None:
    """Named, required and strict. Where the model is free, a tool's schema is the template's
    business."""
    bad: dict[str, Any] = {
        "type": "function",
        "function": {"name": "f", "parameters": {}, **change},
    }
    strict = {"type": "function", "function": {**bad["function"], "strict": True}}
    named = {"type": "function", "function": {"name": bad["function"]["name"]}}
    wishes: list[dict[str, Any]] = [
        {"tools": [WEATHER, bad], "tool_choice": "required"},
        {"tools": [WEATHER, bad], "tool_choice": named},
        {"tools": [WEATHER, strict]},
    ]
    for fields in wishes:
        response = server.chat(**fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param

    assert server.chat(tools=[WEATHER, bad], max_tokens=1).status_code == 200


def test_wishes_that_contradict_each_other_are_refused(server: HttpServer) -> None:
    """What the text must be like, and that there must be calls and no text. A response format is
    dropped there, as in vLLM."""
    required: dict[str, Any] = {"tools": BOTH, "tool_choice": "required", "max_tokens": 4000}

    refused = server.chat(**required, structured_outputs={"regex": "a"})
    dropped = server.chat(**required, response_format=AS_PERSON)
    searched = server.chat(**required, use_beam_search=True)

    assert refused.json()["error"]["param"] == "structured_outputs"
    assert dropped.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert searched.json()["error"]["param"] == "tool_choice"


def test_responses_have_the_form_that_was_asked_for(server: HttpServer) -> None:
    """Under the name that the Responses API has for it, and calls that must be made too."""
    form = {"type": "json_schema", "name": "person", "schema": PERSON}
    tool = {"type": "function", "name": "get_weather", "parameters": TOOLS["get_weather"]}

    answer = server.http.post("/v1/responses", json={"input": "hi", "text": {"format": form}})
    called = server.http.post(
        "/v1/responses", json={"input": "hi", "tools": [tool], "tool_choice": "required"}
    )

    message = answer.json()["output"][-1]
    jsonschema.validate(json.loads(message["content"][0]["text"]), PERSON)
    for item in called.json()["output"]:
        assert item["type"] in ("function_call", "reasoning")
        if item["type"] == "function_call":
            jsonschema.validate(json.loads(item["arguments"]), TOOLS["get_weather"])


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_messages_have_the_form_that_was_asked_for(server: HttpServer, name: str) -> None:
    """Under Anthropic's name for it, and that of its beta; `any` is a call that must be made."""
    form = {"type": "json_schema", "schema": PERSON}
    tool = {"name": "get_weather", "input_schema": TOOLS["get_weather"]}
    ask: dict[str, Any] = {"model": "m", "max_tokens": 4000, "messages": MESSAGES}
    wish = {name: form if name == "output_format" else {"format": form}}

    answer = server.http.post("/v1/messages", json=ask | wish)
    called = server.http.post(
        "/v1/messages", json={**ask, "tools": [tool], "tool_choice": {"type": "any"}}
    )

    jsonschema.validate(json.loads(answer.json()["content"][-1]["text"]), PERSON)
    uses = [block for block in called.json()["content"] if block["type"] == "tool_use"]
    assert uses
    for use in uses:
        jsonschema.validate(use["input"], TOOLS["get_weather"])
