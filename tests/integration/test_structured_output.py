"""Structured output through the whole system: real engine, real workers, real sampler.

The scripted model is made to sample at random (a temperature at which its script does not matter),
so it writes whatever the grammar allows; the demo's model, which is slow, has opinions of its own.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.helpers.http_server import events
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import running_server

TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}\
assistant: {% if thinking is true %}<think>{% elif thinking is false %}<think></think>{% endif %}"""

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": PERSON, "strict": True},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
RANDOM = {"temperature": 100, "max_tokens": 1500}


def as_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("scripted")
    model = make_scripted_model(folder, kind="cycle", token_ids=list(b"abc"))
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--served-model-name", "m", "--chat-template", str(template))
    with running_server(str(model), *flags, "--reasoning-parser", "qwen3") as server:
        with server.http() as client:
            yield client


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Who are you?"}]
    return http.post("/v1/chat/completions", json={"messages": messages, **RANDOM, **fields})


def complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "x", **RANDOM, **fields})


def choices(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def check(choice: dict[str, Any]) -> None:
    """The answer has ended by itself, and is valid."""
    assert choice["finish_reason"] == "stop", choice
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


def test_answers_are_valid_whole_and_streamed(http: httpx.Client) -> None:
    """Several at once, of a model that would say anything."""
    plain = {"thinking": False}
    form = as_format(PERSON)
    for choice in choices(chat(http, response_format=form, n=4, chat_template_kwargs=plain)):
        check(choice)

    response = chat(http, response_format=form, n=2, stream=True, chat_template_kwargs=plain)
    texts = ["", ""]
    for piece in (c for chunk in events(response) for c in chunk["choices"]):
        texts[piece["index"]] += piece["delta"].get("content", "")
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("thinking", [True, False])
def test_answers_are_valid_behind_a_thought(http: httpx.Client, thinking: bool) -> None:
    """The thought itself may be anything."""
    bias = {"60": 100} if thinking else {}  # "<": so that the thought comes to its end
    kwargs = {"thinking": thinking}
    form = as_format(PERSON)

    response = chat(
        http,
        response_format=form,
        chat_template_kwargs=kwargs,
        logit_bias=bias,
        temperature=20,
        max_tokens=400,
    )

    (choice,) = choices(response)
    if choice["finish_reason"] == "stop":
        check(choice)
    else:
        assert thinking
        assert not choice["message"]["content"]


@pytest.mark.parametrize(
    ("wish", "allowed"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}/"}}, None),
        ({"structured_outputs": {"choice": ["red", "green"]}}, ["red", "green"]),
        ({"structured_outputs": {"grammar": 'root ::= "x" y\ny ::= "1" | "2"'}}, ["x1", "x2"]),
        ({"guided_grammar": 'start: "x" Y\nY: "1" | "2"'}, ["x1", "x2"]),
    ],
)
def test_texts_are_of_the_language(
    http: httpx.Client, wish: dict[str, Any], allowed: list[str] | None
) -> None:
    """Expressions, choices and grammars of both kinds."""
    for choice in choices(complete(http, **wish, n=4)):
        assert choice["finish_reason"] == "stop"
        if allowed is None:
            assert choice["text"][3:] == "/"
            assert {*choice["text"][:3]} <= {*"ab"}
        else:
            assert choice["text"] in allowed


class Friend(pydantic.BaseModel):
    since: int = pydantic.Field(ge=0, le=99)


class Person(pydantic.BaseModel):
    """What a user of OpenAI's client writes."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    kind: Literal["cat", "dog"]
    friends: list[Friend] = []


def test_openais_client_parses_answers_into_its_models(http: httpx.Client) -> None:
    """`parse`, of chats and of responses, unmodified: with a model in a model."""
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        asked: list[Any] = [{"role": "user", "content": "Who are you?"}]
        chat = client.chat.completions.parse(
            model="m",
            messages=asked,
            response_format=Person,
            temperature=100,
            extra_body={"chat_template_kwargs": {"thinking": False}},
        )
        response = client.responses.parse(
            model="m",
            input=asked,
            text_format=Person,
            temperature=100,
            extra_body={"chat_template_kwargs": {"thinking": False}},
        )

    assert isinstance(chat.choices[0].message.parsed, Person)
    assert isinstance(response.output_parsed, Person)


def test_white_space_is_as_the_request_says(http: httpx.Client) -> None:
    """None at all, and the model would like some."""
    compact = {"json": PERSON, "disable_any_whitespace": True}
    for choice in choices(complete(http, structured_outputs=compact, n=4)):
        value = json.loads(choice["text"])
        assert choice["text"] == json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def test_calls_are_made_where_they_must_be(http: httpx.Client) -> None:
    """Valid ones, of the tool that there is."""
    wishes: list[tuple[Any, str]] = [("required", "tool_calls"), (NAMED, "stop")]
    for choice, reason in wishes:
        kwargs = {"thinking": False}
        response = chat(
            http,
            tools=[WEATHER],
            tool_choice=choice,
            parallel_tool_calls=False,
            chat_template_kwargs=kwargs,
        )
        (answer,) = choices(response)
        (call,) = answer["message"]["tool_calls"]
        assert (answer["finish_reason"], answer["message"]["content"]) == (reason, None)
        assert call["function"]["name"] == "get_weather"
        jsonschema.validate(json.loads(call["function"]["arguments"]), PERSON)


REFUSED = [
    ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"structured_outputs": {"grammar": 'x: "a"'}}, "structured_outputs"),
    ({"response_format": as_format({"type": "string", "pattern": "a(?=b)"})}, "response_format"),
    ({"response_format": as_format({"type": "array", "uniqueItems": True})}, "response_format"),
]


@pytest.mark.row("S-23")
@pytest.mark.parametrize(("wish", "param"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_a_400(
    http: httpx.Client, wish: dict[str, Any], param: str, stream: bool
) -> None:
    """A plain HTTP error that names the client's own field, for streams too; the next request is
    served."""
    for response in (chat(http, **wish, stream=stream), complete(http, **wish, stream=stream)):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert "Traceback" not in error["message"]

    assert choices(complete(http, structured_outputs={"regex": "ok"}))[0]["text"] == "ok"


@pytest.mark.row("S-24")
def test_tool_that_cannot_be_compiled_is_a_400(http: httpx.Client) -> None:
    """The schema of a strict tool, or of one that must be called, is the tools' fault."""
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}},
        },
    }

    response = chat(http, tools=[tool], tool_choice="required")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


def test_log_probabilities_come_with_it(http: httpx.Client) -> None:
    """One for each token."""
    (choice,) = choices(complete(http, structured_outputs={"regex": "[ab]{5}"}, logprobs=0))

    assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
    assert len(choice["text"]) == 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demos_model_answers_in_form() -> None:
    """A real model with a real vocabulary: valid JSON, and a call where there must be one, whole,
    streamed and several at once."""
    with running_server("demo", "--max-model-len", "2048", "--served-model-name", "m") as server:
        with server.http(timeout_s=300) as client:
            greedy = {"temperature": 0, "max_tokens": 300, "seed": 1}
            form = as_format(PERSON)
            check(choices(chat(client, response_format=form, **greedy))[0])
            for choice in choices(
                chat(client, response_format=form, n=2, temperature=0.7, max_tokens=300, seed=1)
            ):
                check(choice)
            streamed = chat(client, response_format=form, stream=True, **greedy)
            pieces = [c["delta"] for chunk in events(streamed) for c in chunk["choices"]]
            text = "".join(piece.get("content", "") for piece in pieces)
            jsonschema.validate(json.loads(text), PERSON)
            wishes: list[Any] = ["required", NAMED]
            for wish in wishes:
                (answer,) = choices(
                    chat(
                        client,
                        tools=[WEATHER],
                        tool_choice=wish,
                        parallel_tool_calls=False,
                        **greedy,
                    )
                )
                (call,) = answer["message"]["tool_calls"]
                assert call["function"]["name"] == "get_weather"
                jsonschema.validate(json.loads(call["function"]["arguments"]), PERSON)
