"""Requests to /v1/responses, and what comes back."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from engine.wire import EngineCoreRequest, FinishReason
from tests.helpers.http_server import HttpServer

TEMPLATE = """\
{% for tool in tools or [] %}<tools>{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.reasoning %}<think>{{ message.reasoning }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}\
{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"""
"""Shows whatever a template may be given, in Hermes' notation."""

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Now",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
TIME: dict[str, Any] = {"type": "function", "name": "get_time"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
"""A thought, a text and a call."""


def respond(server: HttpServer, **fields: Any) -> httpx.Response:
    """Ask, whatever comes back."""
    return server.http.post("/v1/responses", json={"model": "m", "input": "hi", **fields})


def ask(server: HttpServer, **fields: Any) -> dict[str, Any]:
    """Ask, and read the response."""
    answer = respond(server, **fields)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def stream(server: HttpServer, **fields: Any) -> list[dict[str, Any]]:
    """Ask, and read the events of the stream."""
    answer = respond(server, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def stream_in_two(
    server: HttpServer, then: Callable[[str], object], **fields: Any
) -> list[dict[str, Any]]:
    """The events of a stream in the middle of which something happens.

    Args:
        server: to ask.
        then: called with the response's id, once there is a delta.
        fields: of the request.
    """
    body = {"model": "m", "input": "hi", "stream": True, **fields}
    text = ""
    with server.http.stream("POST", "/v1/responses", json=body) as answer:
        pieces = answer.iter_text()
        while ".delta" not in text:
            text += next(pieces)
        then(events(text.split("event: response.output")[0])[0]["response"]["id"])
        text += "".join(pieces)
    return events(text)


class LateFailure:
    """An answer of a model that writes a letter and fails when it is told to."""

    def __init__(self, letter: str) -> None:
        self._letter = letter
        self._may_fail = threading.Event()

    def __call__(self, request: EngineCoreRequest) -> Iterator[int | FinishReason]:
        yield ord(self._letter)
        self._may_fail.wait(5)
        yield FinishReason.ERROR

    def fail(self, response_id: str) -> None:
        self._may_fail.set()


def events(text: str, first: int = 0) -> list[dict[str, Any]]:
    """The events of a stream. Checks their names and numbers.

    Args:
        text: the body.
        first: number of the first one.
    """
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == [*range(first, first + len(found))]
    return found


def kinds(found: Iterable[dict[str, Any]]) -> list[str]:
    """What happened, in short; deltas that follow each other once."""
    short: list[str] = []
    for event in found:
        kind = event["type"].removeprefix("response.")
        if not short or short[-1] != kind:
            short.append(kind)
    return short


def text_of(response: dict[str, Any]) -> str:
    """The text of all messages."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def shown(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The output, without ids, which are random."""
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
