"""Anything in any place of what says how an output must look: refused as the client's fault, or a
description that the library takes in or refuses in words."""

import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from api.structured import ebnf, fields, structural_tag
from api.structured.keywords import LISTS, MAPS, SINGLE
from api.structured.schema import JsonStyle
from engine.errors import RequestError
from engine.structured_output import StructuredOutput
from tests.helpers.grammar_walk import compiled

KEYWORDS = [
    *(*MAPS, *LISTS, *SINGLE),
    *("type", "enum", "const", "required", "$ref", "format", "pattern", "minLength", "maxItems"),
    *("minProperties", "uniqueItems", "minimum", "multipleOf", "x-guidance", "$id", "title"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["string", "object", "array", "#", "#/$defs/a", "#/properties/a/0", "date"]),
    st.text(max_size=5),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYWORDS, "a", "b"]), inner, max_size=4)
    ),
    max_leaves=20,
)
FORMAT_KEYS = [
    *("type", "format", "tags", "triggers", "begin", "end", "content", "elements", "excludes"),
    *("json_schema", "pattern", "grammar", "value", "min", "max", "structures", "schema"),
    *("separator", "at_least_one", "stop_after_first"),
]
FORMAT_TYPES = [
    *("const_string", "json_schema", "regex", "grammar", "any_text", "sequence", "or", "tag"),
    *("optional", "plus", "star", "repeat", "triggered_tags", "tags_with_separator"),
]
FORMATS = st.recursive(
    st.one_of(SCALARS, st.sampled_from(FORMAT_TYPES)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FORMAT_KEYS), inner, max_size=5)
        | st.fixed_dictionaries(
            {"type": st.sampled_from(FORMAT_TYPES)}, optional=dict.fromkeys(FORMAT_KEYS[2:], inner)
        )
    ),
    max_leaves=20,
)


def check(read: Callable[[], StructuredOutput | None], place: str) -> None:
    """The client is told where it is wrong; or the library takes it, or finds words against it."""
    try:
        output = read()
    except RequestError as error:
        output, param = None, error.param
    else:
        param = place
    assert (param or "").startswith(place)
    if output is not None:
        assert "panic" not in LLMatcher.validate_grammar(compiled(output)).lower()


def wanted(name: str, value: object) -> StructuredOutput | None:
    found = fields.read({name: msgspec.Raw(json.dumps(value).encode())})
    return None if found is None else found.output


@settings(max_examples=150)
@given(name=st.sampled_from(fields.NAMES), value=ANYTHING)
def test_noise_in_a_field_is_the_clients_fault(name: str, value: Any) -> None:
    """Whatever JSON it is."""
    check(lambda: wanted(name, value), name)


@settings(max_examples=300)
@given(value=ANYTHING, strict=st.booleans())
def test_noise_in_a_schema_is_the_clients_fault(value: Any, strict: bool) -> None:
    """With all keywords in all places."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": strict}}

    check(lambda: wanted("response_format", form), "response_format")


@settings(max_examples=200)
@given(value=FORMATS, key=st.sampled_from(["format", "structures"]))
def test_noise_in_a_structural_tag_is_the_clients_fault(value: Any, key: str) -> None:
    """With all formats in all places."""
    raw = json.dumps({key: value, "triggers": ["a"]}).encode()

    check(lambda: structural_tag.read(raw, "tag", JsonStyle()), "tag")


@settings(max_examples=200)
@given(text=st.text(st.sampled_from("root ::=\n|()[]{}*+?\"'\\a-b,1.#u0041"), max_size=40))
def test_noise_in_a_grammar_is_the_clients_fault(text: str) -> None:
    """Between the words of one that is right."""
    for grammar in (f"root ::= {text}", f'root ::= "a"\n{text}', text):
        check(partial(_read_grammar, grammar), "grammar")


def _read_grammar(text: str) -> StructuredOutput:
    return StructuredOutput("lark", ebnf.read(text, "grammar"))


MONSTERS: list[tuple[str, Any]] = [
    ("guided_grammar", "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(600))),
    ("guided_grammar", 'root ::= "a" |' + '"b" |' * 3000 + '"c"'),
    ("guided_grammar", "root ::= " + "(" * 8000),
    ("guided_choice", ["x" * 60] * 999),
    ("guided_json", {"properties": {f"p{i}": {"anyOf": [{}] * 30} for i in range(130)}}),
    (
        "guided_json",
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "null"} for i in range(1000)},
            "required": [f"p{i}" for i in range(999, -1, -1)],
        },
    ),
    (
        "structured_outputs",
        {
            "structural_tag": {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {
                            "type": "triggered_tags",
                            "triggers": [f"<{i}" for i in range(64)],
                            "excludes": [f"no{i}" for i in range(64)],
                            "tags": [
                                {"begin": f"<{i}", "content": {"type": "any_text"}, "end": "."}
                            ],
                        }
                        for i in range(60)
                    ],
                }
            }
        },
    ),
]


@pytest.mark.parametrize(("name", "value"), MONSTERS)
def test_as_much_as_the_limits_allow_takes_no_time(name: str, value: Any) -> None:
    """Reading it, that is; compiling is the engine's, in a process of its own."""
    raw = {name: msgspec.Raw(json.dumps(value).encode())}
    began = time.process_time()

    with contextlib.suppress(RequestError):
        fields.read(raw)

    assert time.process_time() - began < 0.5
