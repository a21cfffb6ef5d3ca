"""JSON schemas of the fields of bodies: of those that structs leave raw, what `prompts`,
`chat_template` and `tools.request` read out of them; of numbers and lists, their bounds. And
examples of the bodies. For the OpenAPI document only: who reads a field checks it.
"""

from typing import Any

from api.limits import (
    DEFAULT_MAX_N,
    MAX_BAD_WORD_CHARS,
    MAX_CACHE_SALT_CHARS,
    MAX_LENGTH_PENALTY,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    MAX_VALUES,
)
from api.structured.openapi_fields import OUTPUT_FORM
from engine.limits import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
)
from engine.sampling_params import BOUNDS

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

_FUNCTION_NAME = {"type": "string", "minLength": 1, "maxLength": MAX_TOOL_NAME_CHARS}
_FUNCTION = {
    "name": _FUNCTION_NAME,
    "description": {"anyOf": [_TEXT, _NULL]},
    "parameters": {"description": "A JSON schema.", "type": "object"},
    "strict": {"anyOf": [{"type": "boolean"}, _NULL]},
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": _FUNCTION, "required": ["name"]},
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


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, _NULL]}


def _number(least: float, most: float) -> dict[str, Any]:
    kind = "integer" if isinstance(most, int) else "number"
    return _optional({"type": kind, "minimum": least, "maximum": most})


def _token_ids(most: int) -> dict[str, Any]:
    token = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
    return {"type": "array", "items": token, "maxItems": most}


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
_STOPS = {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}
_BAD_WORD = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}
_BIAS = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}

_GENERATION = {
    **{name: _number(least, most) for name, least, most in BOUNDS if name != "logprobs"},
    "n": _number(1, DEFAULT_MAX_N),
    "best_of": _number(1, DEFAULT_MAX_N),
    "length_penalty": _number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "truncate_prompt_tokens": _number(-1, MAX_TOKEN_ID),
    "thinking_token_budget": _number(-1, MAX_TOKEN_ID),
    "stream_interval": _number(1, MAX_TOKEN_ID),
    "priority": _number(-MAX_PRIORITY, MAX_PRIORITY),
    "stop": {"anyOf": [_STOP, _STOPS, _NULL]},
    "stop_token_ids": _optional(_token_ids(MAX_STOP_TOKEN_IDS)),
    "allowed_token_ids": _optional({**_token_ids(MAX_LOGIT_BIAS), "minItems": 1}),
    "logprob_token_ids": _optional(_token_ids(MAX_LOGPROB_TOKEN_IDS)),
    "bad_words": _optional({"type": "array", "items": _BAD_WORD, "maxItems": MAX_BAD_WORDS}),
    "logit_bias": _optional(
        {
            "description": "By token id.",
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": _BIAS,
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
    "cache_salt": _optional({"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS}),
}

CHAT = {
    **_GENERATION,
    **OUTPUT_FORM,
    "messages": MESSAGES,
    "max_completion_tokens": _number(1, MAX_TOKEN_ID),
    "top_logprobs": _number(0, MAX_LOGPROBS),
    "chat_template_kwargs": TEMPLATE_VARIABLES,
    "documents": DOCUMENTS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
}
"""Of a `ChatBody`."""

_FLAT_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, **_FUNCTION},
    "required": ["type", "name"],
}
RESPONSE = {
    "tools": {
        "description": "Functions that the model may call.",
        "anyOf": [{"type": "array", "items": _FLAT_TOOL, "maxItems": MAX_TOOLS}, _NULL],
    },
    "tool_choice": {
        "description": "Whether the model may or must call a function, and which.",
        "anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}, _NULL],
    },
    "text": {
        "description": "How the answer is to look.",
        "anyOf": [{"type": "object", "properties": {"format": {"type": "object"}}}, _NULL],
    },
    "chat_template_kwargs": TEMPLATE_VARIABLES,
}
"""Of a `ResponsesBody`, but for its input."""

COMPLETION = {**_GENERATION, **OUTPUT_FORM, "prompt": PROMPT, "logprobs": _number(0, MAX_LOGPROBS)}
"""Of a `CompletionBody`."""

CHAT_EXAMPLE = {
    "messages": [{"role": "user", "content": "What is a ring buffer?"}],
    "max_tokens": 100,
    "stream": True,
}
COMPLETION_EXAMPLE = {"prompt": "The sea is", "max_tokens": 40, "stream": True}
