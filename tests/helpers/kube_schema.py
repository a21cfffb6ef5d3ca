"""Whether a manifest is what a cluster would take: KubeRay's kinds against their own definitions,
core kinds against Kubernetes'. Stricter than an API server, which drops what it does not know.

A definition is OpenAPI with Kubernetes' extensions. It becomes a JSON schema in which

    null              counts as not there, unless the schema says `nullable`
    defaults          are filled in first: what they fill may be required
    unknown fields    are refused, wherever fields are listed
    int-or-string     is either, with the string's pattern
    lists as maps     have no two items with the same keys; lists as sets no two equal items
    CEL rules         hold, but for those on changes: there is no old object
    metadata          is checked for its name alone
"""

import copy
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import kubernetes_validate

DEFINITIONS = Path(__file__).parents[1] / "data" / "kuberay"
KUBERNETES_VERSION = "1.34"

_FILES = {"RayCluster": "rayclusters", "RayJob": "rayjobs"}
_MOST_NAME_CHARS = {"RayCluster": 53, "RayJob": 47}
"""The operator's own rule: it appends to them."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_WITHOUT_SCHEMA = {"PodMonitor", "Kustomization"}
"""Kinds of others whose definitions are not here."""


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a manifest, each with its place; nothing if a cluster would take it."""
    kind = str(document.get("kind"))
    if kind in _FILES:
        return [
            *_custom_problems(kind, document),
            *_name_problems(document, _MOST_NAME_CHARS[kind]),
        ]
    if kind in _WITHOUT_SCHEMA:
        return _name_problems(document, 253) if kind == "PodMonitor" else []
    try:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        place = ".".join(str(each) for each in error.path)
        return [f"{place}: {error.message}"]
    return _name_problems(document, 253)


def _custom_problems(kind: str, document: Mapping[str, Any]) -> list[str]:
    schema, strict = _definition(kind)
    filled = _filled(copy.deepcopy(dict(document)), schema)
    found = [
        f"{error.json_path.removeprefix('$.')}: {error.message}"
        for error in strict.iter_errors(filled)
    ]
    return [*found, *_rule_problems(filled, schema, "")]


def _name_problems(document: Mapping[str, Any], most_chars: int) -> list[str]:
    name = document.get("metadata", {}).get("name", "")
    if not _LABEL.fullmatch(name) or len(name) > most_chars:
        return [f"metadata.name: {name!r} is no name of {most_chars} characters at most"]
    return []


@lru_cache
def _definition(kind: str) -> tuple[dict[str, Any], jsonschema.Draft4Validator]:
    """The schema as it is, and made strict."""
    raw = json.loads(gzip.decompress((DEFINITIONS / f"{_FILES[kind]}.v1.json.gz").read_bytes()))
    [version] = raw["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    return schema, jsonschema.Draft4Validator(_strict(schema) | {"required": ["spec"]})


def _strict(schema: dict[str, Any], name: str = "") -> dict[str, Any]:
    if name == "metadata" and set(schema) <= {"type"}:
        return {"type": "object"}
    strict: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            strict[key] = {each: _strict(sub, each) for each, sub in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            strict[key] = _strict(value)
        elif not key.startswith("x-") and key not in ("default", "nullable"):
            strict[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if (
        "properties" in schema
        and "additionalProperties" not in schema
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        strict["additionalProperties"] = False
    if schema.get("x-kubernetes-list-type") == "set":
        strict["uniqueItems"] = True
    return strict


def _filled(value: Any, schema: Mapping[str, Any]) -> Any:
    """With the schema's defaults, and without what is null."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name, sub in properties.items():
            if value.get(name) is None and "default" in sub and not sub.get("nullable"):
                value[name] = copy.deepcopy(sub["default"])
        others = schema.get("additionalProperties")
        others = others if isinstance(others, dict) else {}
        return {
            name: _filled(each, properties.get(name, others))
            for name, each in value.items()
            if each is not None or properties.get(name, {}).get("nullable")
        }
    if isinstance(value, list):
        return [_filled(each, schema.get("items", {})) for each in value]
    return value


def _rule_problems(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    """Lists that are maps, and CEL rules: what JSON schemas cannot say."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield f"{place}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name, each in value.items():
            yield from _rule_problems(each, properties.get(name, {}), f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        if keys:
            found = [tuple(str(each.get(key)) for key in keys) for each in value]
            for each in sorted({each for each in found if found.count(each) > 1}):
                yield f"{place}: two items with {', '.join(keys)} {', '.join(each)}"
        for index, each in enumerate(value):
            yield from _rule_problems(each, schema.get("items", {}), f"{place}[{index}]")


def _holds(rule: str, value: Any) -> bool:
    program = _program(rule)
    return bool(program.evaluate({"self": celpy.json_to_cel(value)}))


@lru_cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))
