"""JSON schemas that no output can be bound to, each with the place inside of it that is to blame:
broken ones, monstrous ones, and ones that nothing finite fits."""

from typing import Any

DEEP_SCHEMA: Any = {"type": "string"}
for _ in range(40):
    DEEP_SCHEMA = {"type": "array", "items": DEEP_SCHEMA}
for _ in range(40):
    DEEP_SCHEMA = {"properties": {"a": DEEP_SCHEMA}}
"""Brackets in brackets: too deep for wherever it stands, not only for a schema."""

BROKEN_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "banana"}, ".type"),
    ({"type": ["string", "banana"]}, ".type"),
    ({"type": "object", "properties": {"a": "string"}}, ".properties.a"),
    ({"type": "object", "properties": ["a"]}, ".properties"),
    ({"type": "array", "items": 7}, ".items"),
    ({"anyOf": []}, ".anyOf"),
    ({"anyOf": [{"type": "string"}, 7]}, ".anyOf[1]"),
    ({"enum": []}, ".enum"),
    ({"enum": "a"}, ".enum"),
    ({"enum": list(range(1001))}, ".enum"),
    ({"required": "a"}, ".required"),
    ({"properties": {f"p{i}": {} for i in range(1001)}}, ".properties"),
    ({"$ref": "#/$defs/nowhere"}, ".$ref"),
    ({"$ref": "https://example.com/schema"}, ".$ref"),
    ({"$ref": "#"}, ""),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ""),
    ({"type": "string", "pattern": "a" * 5000}, ".pattern"),
    ({"patternProperties": {"a" * 5000: {}}}, ".patternProperties"),
    ({"type": "string", "maxLength": 10**9}, ".maxLength"),
    ({"type": "string", "minLength": -1}, ".minLength"),
    ({"type": "array", "minItems": 2.5}, ".minItems"),
    ({"type": "array", "maxItems": True}, ".maxItems"),
    ({"description": "x" * 66_000}, ""),
    ({"anyOf": [{"anyOf": [{}] * 900}] * 20}, ""),
]
