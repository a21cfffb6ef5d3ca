"""The `openai` Python client, unmodified, with tools and thoughts, against a scripted model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import running_server

TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}
{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{{ '<think>' if add_generation_prompt else '</think>' }}"""

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

ARGUMENTS = [
    '{"city": "München", "note": "</tool_call> {\\"}"}',
    '{"city": "東京 🙂"}',
]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
MESSAGES: list[Any] = [{"role": "user", "content": "Compare the weather, please."}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Of a server whose model thinks, says something, and calls a tool twice."""
    folder: Path = tmp_path_factory.mktemp("tools")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    model = make_scripted_model(folder, kind="tokens", token_ids=list(ANSWER.encode()))
    flags = ("--served-model-name", "m", "--chat-template", str(template))
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with (
        running_server(str(model), *flags, *parsers, "--reasoning-parser", "qwen3") as server,
        openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0) as it,
    ):
        yield it


def ask(client: openai.OpenAI, **options: Any) -> Any:
    arguments: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, **options}
    return client.chat.completions.create(model="m", temperature=0, **arguments)


def check_message(message: Any) -> None:
    assert message.content == "I will look that up."
    assert message.reasoning_content == message.reasoning == "They ask for two cities: é, 漢字."
    assert [call.function.name for call in message.tool_calls] == ["get_weather"] * 2
    assert [call.function.arguments for call in message.tool_calls] == ARGUMENTS
    assert len({call.id for call in message.tool_calls}) == 2


def test_calls_tools(client: openai.OpenAI) -> None:
    """Thoughts, content and calls, each in its place."""
    choice = ask(client).choices[0]

    check_message(choice.message)
    assert choice.finish_reason == "tool_calls"


def test_streams_calls(client: openai.OpenAI) -> None:
    """Chunks add up to the whole answer, by the rules that every client has."""
    content, thought, calls, reasons = "", "", dict[int, Any](), []
    for chunk in ask(client, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for piece in choice.delta.tool_calls or []:
            if piece.id is not None:
                assert piece.index == len(calls)
                assert piece.type == "function"
                calls[piece.index] = [piece.id, piece.function.name, ""]
            calls[piece.index][2] += piece.function.arguments

    assert (content, thought) == ("I will look that up.", "They ask for two cities: é, 漢字.")
    assert [call[2] for call in calls.values()] == ARGUMENTS
    assert {call[1] for call in calls.values()} == {"get_weather"}
    assert len({call[0] for call in calls.values()}) == 2
    assert reasons == ["tool_calls"]


def test_streaming_helper_of_the_client(client: openai.OpenAI) -> None:
    """Its own accumulation of chunks, with its events for arguments."""
    arguments: Any = {"messages": MESSAGES, "tools": TOOLS}
    with client.chat.completions.stream(model="m", temperature=0, **arguments) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message

    assert [call.function.arguments for call in message.tool_calls or []] == ARGUMENTS
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert message.content == "I will look that up."


def test_conversation_goes_on_with_results(client: openai.OpenAI) -> None:
    """The client's own message object goes back as it is."""
    message = ask(client).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "3 °C"} for call in message.tool_calls
    ]

    answer = ask(client, messages=[*MESSAGES, message, *results])

    check_message(answer.choices[0].message)
    assert answer.usage.prompt_tokens > len("".join(ARGUMENTS).encode())


def test_a_call_that_must_come_comes_first(client: openai.OpenAI) -> None:
    """Whatever the model would rather say: `required`, or by name."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        message = ask(client, tool_choice=choice, max_tokens=200).choices[0].message
        assert message.content is None
        assert message.tool_calls[0].function.name == "get_weather"


def test_answers_in_text_without_tools(client: openai.OpenAI) -> None:
    """`tool_choice` none: what looks like a call is content."""
    choice = ask(client, tool_choice="none").choices[0]

    assert choice.message.tool_calls is None
    assert choice.message.content.count("<tool_call>") == 2
    assert choice.finish_reason == "stop"
