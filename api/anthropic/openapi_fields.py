"""JSON schemas of the fields that Anthropic's bodies leave raw, as `conversation` and `tools` read
them; and examples. For the OpenAPI document only: who reads a field checks it."""

from typing import Any

from api.limits import (
    MAX_CALL_ID_CHARS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    MAX_VALUES,
)
from api.openapi_fields import CACHE_SALT, NUMBERS, TEMPLATE_VARIABLES, number
from engine.limits import MAX_TOKEN_ID

_TEXT = {"type": "string"}
_NULL = {"type": "null"}
_ID = {"type": "string", "minLength": 1, "maxLength": MAX_CALL_ID_CHARS}


def _block(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **fields},
        "required": ["type", *fields],
    }


def _content(*blocks: dict[str, Any]) -> dict[str, Any]:
    """A text, or blocks of these kinds."""
    items = {"anyOf": list(blocks)}
    return {"anyOf": [_TEXT, {"type": "array", "items": items, "maxItems": MAX_VALUES}]}


_TEXT_BLOCK = _block("text", text=_TEXT)
_RESULT = _block("tool_result", tool_use_id=_ID)
_RESULT["properties"]["content"] = _content(_TEXT_BLOCK)
_MESSAGE_CONTENT = _content(
    _TEXT_BLOCK,
    _block("thinking", thinking=_TEXT),
    _block("tool_use", id=_ID, name=_ID, input={"type": "object"}),
    _RESULT,
)
_MESSAGES: dict[str, Any] = {
    "description": "What was said so far. The model goes on where a last one of its own ends.",
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_VALUES,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": _MESSAGE_CONTENT,
        },
        "required": ["role", "content"],
    },
}
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_TOOL_NAME_CHARS},
        "description": {"anyOf": [_TEXT, _NULL]},
        "input_schema": {"description": "A JSON schema.", "type": "object"},
        "strict": {"anyOf": [{"type": "boolean"}, _NULL]},
    },
    "required": ["name", "input_schema"],
}
_EFFORT = {"enum": ["low", "medium", "high", "xhigh", "max", None]}
_FORMAT: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
        },
        _NULL,
    ]
}
_OUTPUT_CONFIG = {
    "anyOf": [{"type": "object", "properties": {"effort": _EFFORT, "format": _FORMAT}}, _NULL]
}

_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
_THINKING = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["enabled", "disabled", "adaptive"]},
                "budget_tokens": number(1, MAX_TOKEN_ID),
                "display": {"anyOf": [_TEXT, _NULL]},
            },
            "required": ["type"],
        },
        _NULL,
    ]
}

COUNT_FIELDS: dict[str, Any] = {
    "messages": _MESSAGES,
    "system": {"anyOf": [*_content(_TEXT_BLOCK)["anyOf"], _NULL]},
    "tools": {"anyOf": [{"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}, _NULL]},
    "output_config": _OUTPUT_CONFIG,
    "output_format": _FORMAT,
    "thinking": _THINKING,
    "chat_template_kwargs": TEMPLATE_VARIABLES,
}
"""Of a `CountTokensBody`."""

FIELDS: dict[str, Any] = {
    **COUNT_FIELDS,
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_TOKEN_ID},
    "stop_sequences": {
        "anyOf": [{"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, _NULL]
    },
    **{name: NUMBERS[name] for name in ("temperature", "top_p", "top_k")},
    "cache_salt": CACHE_SALT,
}
"""Of a `MessagesBody`."""

COUNT_EXAMPLE: dict[str, Any] = {
    "system": "Answer in one sentence.",
    "messages": [{"role": "user", "content": "What is a ring buffer?"}],
}
EXAMPLE: dict[str, Any] = {"max_tokens": 100, **COUNT_EXAMPLE}
