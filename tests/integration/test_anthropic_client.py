"""The `anthropic` Python client, unmodified, against a scripted model behind a real server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import pydantic
import pytest

from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import Server, running_server

TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}
{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{% if enable_thinking is false %}<think></think>
{%- elif add_generation_prompt %}<think>{% else %}</think>{% endif %}"""

ANSWER = """\
They ask for two cities: é, 漢字.
</think>

I will look that up.
<tool_call>
{"name": "get_weather", "arguments": {"city": "München", "note": "</tool_call> {\\"}"}}
</tool_call>
<tool_call>
{"name": "get_weather", "arguments": {"city": "東京 🙂"}}
</tool_call>"""

INPUTS: list[Any] = [{"city": "München", "note": '</tool_call> {"}'}, {"city": "東京 🙂"}]

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}
]
MESSAGES: list[Any] = [{"role": "user", "content": "Compare the weather, please."}]
COMMON: dict[str, Any] = {"model": "m", "max_tokens": 500, "extra_body": {"temperature": 0}}
"""New versions of the client have no argument for a temperature."""
RANDOM: dict[str, Any] = {
    "model": "m",
    "max_tokens": 3000,
    "thinking": {"type": "disabled"},
    "extra_body": {"temperature": 100},
}
"""So hot that the script does not matter: the model says whatever it may."""


class Person(pydantic.BaseModel):
    """Without bounds: the client leaves them out of the schemas that it sends."""

    name: str
    age: int
    kind: Literal["cat", "dog"]


PERSON: list[Any] = [
    {"name": "meet", "description": "A person", "input_schema": Person.model_json_schema()}
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its model thinks, says something, and calls a tool twice."""
    folder: Path = tmp_path_factory.mktemp("tools")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    model = make_scripted_model(folder, kind="tokens", token_ids=list(ANSWER.encode()))
    flags = ("--served-model-name", "m", "--chat-template", str(template))
    with running_server(str(model), *flags, "--reasoning-parser", "qwen3") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as it:
        yield it


def check_content(content: Any) -> None:
    """The answer in full, as the client's own types."""
    thought, text, *calls = content
    assert (thought.type, thought.thinking) == ("thinking", "They ask for two cities: é, 漢字.")
    assert (text.type, text.text) == ("text", "I will look that up.")
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "get_weather", input_) for input_ in INPUTS
    ]
    assert len({call.id for call in calls}) == 2


def test_creates_a_message(client: anthropic.Anthropic) -> None:
    """Blocks, usage, why it has ended, and the id of the request."""
    message = client.messages.create(messages=MESSAGES, tools=TOOLS, **COMMON)

    check_content(message.content)
    assert (message.role, message.model, message.type) == ("assistant", "m", "message")
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.usage.output_tokens == len(ANSWER.encode()) + 1
    assert message.usage.input_tokens > 100
    assert message._request_id


def test_streams_a_message(client: anthropic.Anthropic) -> None:
    """The client's helper puts it together, and has events of its own for texts and inputs."""
    texts: list[str] = []
    thoughts: list[str] = []
    inputs: list[str] = []
    with client.messages.stream(messages=MESSAGES, tools=TOOLS, **COMMON) as stream:
        for event in stream:
            match event.type:
                case "text":
                    texts.append(event.text)
                case "thinking":
                    thoughts.append(event.thinking)
                case "input_json":
                    inputs.append(event.partial_json)
        message = stream.get_final_message()

    check_content(message.content)
    assert "".join(texts) == "I will look that up."
    assert "".join(thoughts) == "They ask for two cities: é, 漢字."
    assert len(inputs) > 2
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(ANSWER.encode()) + 1


def test_streams_raw_events(client: anthropic.Anthropic) -> None:
    """Without the helper: each event by its own type."""
    kinds = [
        event.type for event in client.messages.create(messages=MESSAGES, stream=True, **COMMON)
    ]

    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_the_asynchronous_client_too(server: Server) -> None:
    """The same answer."""

    async def ask() -> Any:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client,
            client.messages.stream(messages=MESSAGES, tools=TOOLS, **COMMON) as stream,
        ):
            return await stream.get_final_message()

    check_content(asyncio.run(ask()).content)


def test_results_go_back(client: anthropic.Anthropic) -> None:
    """What an answer has said goes into the next request as it is, with the results of its
    calls."""
    first = client.messages.create(messages=MESSAGES, tools=TOOLS, **COMMON)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "4"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]

    second = client.messages.create(messages=messages, tools=TOOLS, **COMMON)
    count = client.messages.count_tokens(model="m", messages=messages, tools=TOOLS)

    check_content(second.content)
    usage = second.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens
    assert usage.cache_read_input_tokens > 100


def test_answers_are_parsed(client: anthropic.Anthropic) -> None:
    """Into the client's own classes, whatever the model would rather say."""
    for _ in range(3):
        message = client.messages.parse(messages=MESSAGES, output_format=Person, **RANDOM)

        assert isinstance(message.parsed_output, Person)
        assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "meet"}])
def test_tools_are_called_where_they_must_be(client: anthropic.Anthropic, choice: Any) -> None:
    """With input that is valid, whole and streamed."""
    wish = {"messages": MESSAGES, "tools": PERSON, **RANDOM}
    wish["tool_choice"] = {**choice, "disable_parallel_tool_use": True}

    message = client.messages.create(**wish)
    with client.messages.stream(**wish) as stream:
        streamed = stream.get_final_message()

    for each in (message, streamed):
        content: Any = each.content
        [block] = content
        assert block.type == "tool_use"
        Person.model_validate(block.input)
        assert each.stop_reason == "tool_use"


def test_a_coding_agents_request(client: anthropic.Anthropic) -> None:
    """As Claude Code sends them: several blocks of system with marks for the cache, dozens of
    tools, reminders, thinking, a far too large `max_tokens`, and beta fields."""
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000"}
    system: list[Any] = [
        billing,
        {"type": "text", "text": "You are a coding agent.", **cached},
        {"type": "text", "text": "Be brief. " * 50, **cached},
    ]
    tools: list[Any] = [
        {"name": f"Tool{i}", "description": "Does things. " * 20, "input_schema": SCHEMA}
        for i in range(30)
    ]
    reminder = {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"}
    question = {"type": "text", "text": "Fix it.", **cached}
    messages: list[Any] = [{"role": "user", "content": [reminder, question]}]

    with client.beta.messages.stream(
        model="m",
        max_tokens=32_000,
        system=system,
        messages=messages,
        tools=[*tools, *TOOLS],
        metadata={"user_id": "user_1_account__session_2"},
        thinking={"type": "enabled", "budget_tokens": 31_999},
        extra_body={"temperature": 0},
        betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ) as stream:
        message = stream.get_final_message()

    check_content(message.content)
    assert message.stop_reason == "tool_use"


@pytest.mark.row("S-34")
def test_images_are_refused(client: anthropic.Anthropic) -> None:
    """Clearly: the model reads text."""
    source = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
    content: list[Any] = [{"type": "image", "source": source}, {"type": "text", "text": "?"}]

    with pytest.raises(anthropic.BadRequestError, match="no images"):
        client.messages.create(messages=[{"role": "user", "content": content}], **COMMON)


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    """Unknown models and bad values raise what the client has for them."""
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        client.messages.create(model="nobody", max_tokens=1, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        client.messages.create(messages=MESSAGES, **COMMON | {"extra_body": {"temperature": -1}})
    assert caught.value.request_id
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(messages=[{"role": "user", "content": "x" * 40_000}], **COMMON)
