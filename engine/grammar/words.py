"""What llguidance says of a grammar that it does not take, in words for whoever sent it. Pure.

Used by `compiler` and `check_process`. The library names its own options and shows its inner state
and the grammar around an expression; a client has seen none of that.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.structured_output import StructuredOutput

Schema = Mapping[str, Any]

_MAX_CHARS = 400
_MAX_PLACES = 3

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_REGEX = re.compile(r"regex parse error:.*?\nerror: ([^\n]+)", re.DOTALL)
_MARKED = re.compile(r"\n    ([^\n]*)\n    ( *)(\^+) *\n")
"""The expression, or a line of it, and what is wrong with it marked below."""
_NO_TEXT = "Unsatisfiable schema: Regex is empty"

_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")
_WITHOUT_STRICT = "a response_format that is not strict"


def reason(output: StructuredOutput, error: str) -> str:
    """Return in one line why `output` cannot be compiled.

    Args:
        output: whose place in the request its client knows.
        error: what the library has said.
    """
    if error.startswith("NoExtension"):
        return "no text at all would be valid"
    if found := _UNIMPLEMENTED.search(error):
        keys = json.loads(found[1])
        place = _places(output, lambda schema: any(key in schema for key in keys))
        return (
            f"{_shown(keys)} cannot be enforced{place}: leave it out, or send {_WITHOUT_STRICT},"
            " which ignores it"
        )
    if "oneOf constraints" in error:
        place = _places(output, lambda schema: "oneOf" in schema)
        return (
            f"oneOf cannot be enforced{place}, since its branches may overlap: make them disjoint,"
            f" write anyOf, or send {_WITHOUT_STRICT}, which takes it for anyOf"
        )
    if found := _REGEX.search(error):
        place = _places(output, lambda schema: _has_expression(schema, error))
        which = "" if output.kind == "regex" else f"the regular expression{place}: "
        return f"{which}{found[1]}{_marked(error)}"[:_MAX_CHARS]
    if _NO_TEXT in error:
        return "no text has the pattern, the format and the length that one place asks for together"
    text = error.split("<state>")[0].replace("<non-verbose/>", "")
    return " ".join(text.split())[:_MAX_CHARS]


def _shown(keys: list[str]) -> str:
    return " and ".join(key[:64] for key in keys[:_MAX_PLACES])


def _marked(error: str) -> str:
    """The part of an expression that is wrong."""
    found = _MARKED.search(error)
    if found is None:
        return ""
    start = len(found[2])
    part = found[1][start : start + len(found[3])]
    return f": {part[:40]!r}" if part.strip() else ""


def _has_expression(schema: Schema, error: str) -> bool:
    """Whether it is this schema's expression that is shown."""
    expressions = [schema.get("pattern"), *(schema.get("patternProperties") or ())]
    return any(f"\n    {each}\n" in error for each in expressions if each)


def _places(output: StructuredOutput, is_meant: Callable[[Schema], bool]) -> str:
    """Where in a schema the schemas are that are meant, if it is a schema and they are few."""
    if output.kind != "json_schema":
        return ""
    found = list(_paths(json.loads(output.spec), is_meant, ""))
    inner = [path for path in found if path]
    if not inner or len(found) > _MAX_PLACES:
        return ""
    return " at " + " and ".join(inner)


def _paths(schema: Any, is_meant: Callable[[Schema], bool], path: str) -> Iterator[str]:
    """The paths of all schemas in a schema that are meant."""
    if isinstance(schema, list):
        for i, each in enumerate(schema):
            yield from _paths(each, is_meant, f"{path}[{i}]")
    if not isinstance(schema, dict):
        return
    if is_meant(schema):
        yield path[:100]
    for key, value in schema.items():
        place = f"{path}.{key}" if path else key
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            for name, each in value.items():
                yield from _paths(each, is_meant, f"{place}.{name}")
        elif key not in _VALUES:
            yield from _paths(value, is_meant, place)
