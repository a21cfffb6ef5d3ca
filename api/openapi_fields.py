"""JSON schemas of the fields that bodies leave raw: what `prompts`, `chat_template` and
`tools.request` read out of them; and examples of the bodies. For the OpenAPI document only: who
reads a field checks it.
"""

from typing import Any

from api.prompts import MAX_PROMPTS, MAX_VALUES
from api.tools.json_scan import MAX_NAME_CHARS
from api.tools.request import MAX_TOOLS

_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_NULL = {"type": "null"}

PROMPT: dict[str, Any] = {
    "description": "A text, a list of token ids, or a list of either.",
    "anyOf": [
        _TEXT,
        _TOKENS,
        {
            "type": "array",
            "items": {"anyOf": [_TEXT, _TOKENS]},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ],
}

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "arguments": _TEXT},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
MESSAGES: dict[str, Any] = {
    "description": "What was said so far. The model's chat template decides which roles there are.",
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_VALUES,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}, _NULL]},
            "name": _TEXT,
            "tool_calls": {"type": "array", "items": _CALL},
            "tool_call_id": _TEXT,
        },
        "required": ["role"],
    },
}

TEMPLATE_VARIABLES: dict[str, Any] = {
    "description": "Further variables for the chat template.",
    "anyOf": [{"type": "object"}, _NULL],
}

DOCUMENTS: dict[str, Any] = {
    "description": "For chat templates that quote documents.",
    "anyOf": [
        {
            "type": "array",
            "items": {"type": "object", "additionalProperties": _TEXT},
            "maxItems": MAX_VALUES,
        },
        _NULL,
    ],
}

_FUNCTION_NAME = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": _FUNCTION_NAME,
                "description": {"anyOf": [_TEXT, _NULL]},
                "parameters": {"description": "A JSON schema.", "type": "object"},
                "strict": {"anyOf": [{"type": "boolean"}, _NULL]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
TOOLS: dict[str, Any] = {
    "description": "Functions that the model may call.",
    "anyOf": [{"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}, _NULL],
}

_NAMED_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _FUNCTION_NAME},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
TOOL_CHOICE: dict[str, Any] = {
    "description": "Whether the model may or must call a function, and which.",
    "anyOf": [{"enum": ["auto", "none", "required"]}, _NAMED_TOOL, _NULL],
}

CHAT = {
    "messages": MESSAGES,
    "chat_template_kwargs": TEMPLATE_VARIABLES,
    "documents": DOCUMENTS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
}
"""Of a `ChatBody`."""

COMPLETION = {"prompt": PROMPT}
"""Of a `CompletionBody`."""

CHAT_EXAMPLE = {
    "messages": [{"role": "user", "content": "What is a ring buffer?"}],
    "max_tokens": 100,
    "stream": True,
}
COMPLETION_EXAMPLE = {"prompt": "The sea is", "max_tokens": 40, "stream": True}
