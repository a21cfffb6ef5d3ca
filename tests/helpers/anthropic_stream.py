"""Streams of Anthropic's Messages API, what a client makes of them, and a template for them."""

import json
from typing import Any

import httpx

TEMPLATE = """\
{% for tool in tools or [] %}<tools>{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{{ reasoning_effort }}\
{% if enable_thinking is true %}<think>
{% elif enable_thinking is false %}<think></think>{% endif %}{% endif %}"""


def stream_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of all events; checks that each has its type as its name."""
    found = []
    for text in response.text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to; checks the order of its events."""
    start, *rest = events
    assert start["type"] == "message_start"
    message: dict[str, Any] = start["message"]
    assert message["content"] == []
    assert [each["type"] for each in rest[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = message["content"]
    is_open = False
    for event in rest[:-2]:
        match event["type"]:
            case "ping":
                continue
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                is_open = True
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                _add(blocks[-1], event["delta"])
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use" and text:
            block["input"] = json.loads(text)
    end = rest[-2]
    return {**message, **end["delta"], "usage": message["usage"] | end["usage"]}


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta.pop("type"):
        case "input_json_delta":
            block["json"] += delta["partial_json"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case _:
            [(name, text)] = delta.items()
            block[name] += text
