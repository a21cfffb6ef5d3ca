"""JSON schemas of the fields of bodies: of those that structs leave raw, what `prompts`,
`chat_template` and `tools.request` read out of them; of numbers and lists, their bounds. And
examples of the bodies. For the OpenAPI document only: who reads a field checks it.
"""

from typing import Any

from api.limits import (
    MAX_BAD_WORD_CHARS,
    MAX_CACHE_SALT_CHARS,
    MAX_DETOKENIZED,
    MAX_INCLUDED,
    MAX_LENGTH_PENALTY,
    MAX_METADATA,
    MAX_METADATA_VALUE_CHARS,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    MAX_VALUES,
)
from api.sampling_fields import SamplingFields
from api.structured.openapi_fields import OUTPUT_FORM
from engine.limits import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_REPETITION_TOKENS,
    MAX_REPETITIONS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
)
from engine.sampling_params import BOUNDS

_TEXT = {"type": "string"}
_TOKEN = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_TOKENS = {"type": "array", "items": _TOKEN, "minItems": 1}
_NULL = {"type": "null"}

TOKENS = {"type": "array", "items": _TOKEN, "maxItems": MAX_DETOKENIZED}
"""Of a `DetokenizeBody`."""

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
_PARTS = {"type": "array", "items": _PART, "minItems": 1, "maxItems": MAX_VALUES}
MESSAGES: dict[str, Any] = {
    "description": "What was said so far. The model's chat template decides which roles there are.",
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_VALUES,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [_TEXT, _PARTS, _NULL]},
            "name": _TEXT,
            "tool_calls": {"type": "array", "items": _CALL, "maxItems": MAX_VALUES},
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


def number(least: float, most: float) -> dict[str, Any]:
    """A number within bounds, or null."""
    return _optional(_plain_number(least, most))


def _plain_number(least: float, most: float) -> dict[str, Any]:
    kind = "integer" if isinstance(most, int) else "number"
    return {"type": kind, "minimum": least, "maximum": most}


def _token_ids(most: int) -> dict[str, Any]:
    return {"type": "array", "items": _TOKEN, "maxItems": most}


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
_STOPS = {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}
_BAD_WORD = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}
_BIAS = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}

_REPETITION = {
    "type": "object",
    "properties": {
        "max_pattern_size": _plain_number(0, MAX_REPETITION_TOKENS),
        "min_pattern_size": _plain_number(0, MAX_REPETITION_TOKENS),
        "min_count": _plain_number(2, MAX_REPETITIONS),
    },
}
CACHE_SALT = _optional({"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS})

NUMBERS = {name: number(least, most) for name, least, most in BOUNDS}
"""Of each number that says how to sample."""

_SAMPLING = {
    **{name: each for name, each in NUMBERS.items() if name in SamplingFields.__struct_fields__},
    "stop": {"anyOf": [_STOP, _STOPS, _NULL]},
    "stop_token_ids": _optional(_token_ids(MAX_STOP_TOKEN_IDS)),
    "allowed_token_ids": _optional({**_token_ids(MAX_LOGIT_BIAS), "minItems": 1}),
    "logit_bias": _optional(
        {
            "description": "By token id.",
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": _BIAS,
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
}
_GENERATION = {
    **_SAMPLING,
    "max_tokens": NUMBERS["max_tokens"],
    "prompt_logprobs": NUMBERS["prompt_logprobs"],
    "repetition_detection": _optional(_REPETITION),
    "length_penalty": number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "truncate_prompt_tokens": number(-1, MAX_TOKEN_ID),
    "thinking_token_budget": number(-1, MAX_TOKEN_ID),
    "stream_interval": number(1, MAX_TOKEN_ID),
    "priority": number(-MAX_PRIORITY, MAX_PRIORITY),
    "logprob_token_ids": _optional(_token_ids(MAX_LOGPROB_TOKEN_IDS)),
    "bad_words": _optional({"type": "array", "items": _BAD_WORD, "maxItems": MAX_BAD_WORDS}),
    "cache_salt": CACHE_SALT,
}

_CHAT = {
    **_GENERATION,
    **OUTPUT_FORM,
    "messages": MESSAGES,
    "max_completion_tokens": number(1, MAX_TOKEN_ID),
    "top_logprobs": number(0, MAX_LOGPROBS),
    "chat_template_kwargs": TEMPLATE_VARIABLES,
    "documents": DOCUMENTS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
}

_FLAT_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, **_FUNCTION},
    "required": ["type", "name"],
}
_ITEMS = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}, "maxItems": MAX_VALUES}]}
RESPONSE = {
    **_SAMPLING,
    "input": {"description": "A text, or items.", **_ITEMS},
    "include": _optional({"type": "array", "items": _TEXT, "maxItems": MAX_INCLUDED}),
    "max_output_tokens": number(1, MAX_TOKEN_ID),
    "max_tool_calls": number(1, MAX_TOKEN_ID),
    "top_logprobs": number(0, MAX_LOGPROBS),
    "priority": number(-MAX_PRIORITY, MAX_PRIORITY),
    "cache_salt": CACHE_SALT,
    "metadata": _optional(
        {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARS},
            "maxProperties": MAX_METADATA,
        }
    ),
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
"""Of a `ResponsesBody`."""

_COMPLETION = {
    **_GENERATION,
    **OUTPUT_FORM,
    "prompt": PROMPT,
    "logprobs": number(0, MAX_LOGPROBS),
}


def chat(max_n: int) -> dict[str, Any]:
    """Of a `ChatBody`, where a request has so many choices at most."""
    return {**_CHAT, **_choices(max_n)}


def completion(max_n: int) -> dict[str, Any]:
    """Of a `CompletionBody`."""
    return {**_COMPLETION, **_choices(max_n)}


def _choices(max_n: int) -> dict[str, Any]:
    return {"n": number(1, max_n), "best_of": number(1, max_n)}


CHAT_EXAMPLE = {
    "messages": [{"role": "user", "content": "What is a ring buffer?"}],
    "max_tokens": 100,
    "stream": True,
}
COMPLETION_EXAMPLE = {"prompt": "The sea is", "max_tokens": 40, "stream": True}
