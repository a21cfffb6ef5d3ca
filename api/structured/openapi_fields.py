"""JSON schemas of the fields that say what an output must look like, for the OpenAPI document only:
who reads a field checks it."""

from typing import Any

from api.limits import MAX_CHOICES

_TEXT = {"type": "string"}
_NULL = {"type": "null"}
_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "boolean"}]}
_CHOICES = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
    "maxItems": MAX_CHOICES,
}
_SCHEMA_OR_TEXT = {"anyOf": [*_SCHEMA["anyOf"], _TEXT, _NULL]}
_OPTIONAL_TEXT = {"anyOf": [_TEXT, _NULL]}
_OPTIONAL_BOOL = {"anyOf": [{"type": "boolean"}, _NULL]}

RESPONSE_FORMAT: dict[str, Any] = {
    "description": "What the answer must look like.",
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": _TEXT,
                        "description": _OPTIONAL_TEXT,
                        "schema": _SCHEMA,
                        "strict": _OPTIONAL_BOOL,
                    },
                    "required": ["name", "schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "structural_tag"}, "format": {"type": "object"}},
            "required": ["type"],
        },
        _NULL,
    ],
}
STRUCTURED_OUTPUTS: dict[str, Any] = {
    "description": "What the output must look like: exactly one of the first six.",
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "json": _SCHEMA_OR_TEXT,
                "regex": _OPTIONAL_TEXT,
                "choice": {"anyOf": [_CHOICES, _NULL]},
                "grammar": _OPTIONAL_TEXT,
                "json_object": _OPTIONAL_BOOL,
                "structural_tag": {"anyOf": [{"type": "object"}, _TEXT, _NULL]},
                "disable_any_whitespace": _OPTIONAL_BOOL,
                "disable_additional_properties": _OPTIONAL_BOOL,
                "whitespace_pattern": _OPTIONAL_TEXT,
            },
        },
        _NULL,
    ],
}
OUTPUT_FORM: dict[str, Any] = {
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "guided_json": _SCHEMA_OR_TEXT,
    "guided_regex": _OPTIONAL_TEXT,
    "guided_choice": {"anyOf": [_CHOICES, _NULL]},
    "guided_grammar": _OPTIONAL_TEXT,
    "guided_whitespace_pattern": _OPTIONAL_TEXT,
}
"""Of both generating routes."""
