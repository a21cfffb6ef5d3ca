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
    """The data of all events of a stream."""
    return parse(response.text)


def parse(stream: str) -> list[dict[str, Any]]:
    """The same of its text; checks that each event has its type as its name."""
    found = []
    for text in stream.split("\n\n")[:-1]:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to; checks the order of its events."""
    start, *rest, end, stop = events
    message: dict[str, Any] = start["message"]
    assert (start["type"], message["content"]) == ("message_start", [])
    assert (end["type"], stop["type"]) == ("message_delta", "message_stop")
    content = joined_blocks([event for event in rest if event["type"] != "ping"])
    usage = message["usage"] | end["usage"]
    return {**message, **end["delta"], "content": content, "usage": usage}


def joined_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that events add up to; checks their order."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        kind = event["type"]
        assert is_open == (kind != "content_block_start")
        if kind == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
        assert event["index"] == len(blocks) - 1
        if kind == "content_block_delta":
            _add(blocks[-1], event["delta"])
        elif kind == "content_block_stop":
            is_open = False
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use" and text:
            block["input"] = json.loads(text)
    return blocks


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta.pop("type"):
        case "input_json_delta":
            block["json"] += delta["partial_json"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case _:
            [(name, text)] = delta.items()
            block[name] += text
