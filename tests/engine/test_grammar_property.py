"""Whatever is sampled, under whatever schema: always the beginning of something valid, and at its
end valid."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.grammar.compiler import Compiler
from engine.grammar.matcher import Matcher
from tests.helpers.grammars import END, make_compiler, matcher_of, possible, schema, spec

MAX_RANDOM = 150
"""Tokens of noise; from there on, those that finish most quickly."""

FINISHING = [END, *b'"}],:1234567890truefalsn']
"""In this order: what ends a text, a string, an object, a list, a number; then what begins a short
value."""

scalars = st.sampled_from(
    [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "string"},
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "pattern": "^[a-z]{1,3}-[0-9]+$"},
        {"type": "string", "format": "date"},
        {"enum": ["a", "b\"'\\", 3, None, {"deep": [1]}]},
        {"const": "exactly this, und nichts anderes: ¶"},
        {"type": ["integer", "null"]},
    ]
)
names = st.sampled_from(["a", "b", "name with space", "ü", 'qu"ote', "$ref"])


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda each, least, more: {
            "type": "array",
            "items": each,
            "minItems": least,
            "maxItems": least + more,
        },
        items,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, num_required, is_open: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": is_open,
        },
        st.dictionaries(names, values, max_size=3),
        st.integers(0, 3),
        st.booleans(),
    )


schemas = st.recursive(
    scalars,
    lambda inner: (
        lists(inner)
        | objects(inner)
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return make_compiler(tmp_path_factory.mktemp("model"))


def sampled(matcher: Matcher, noise: np.random.Generator, num_random: int) -> bytes:
    """So many random tokens, then the way out."""
    text = b""
    while not matcher.is_over:
        tokens = possible(matcher)
        if len(text) < num_random:
            token = int(noise.choice(tokens))
        else:
            token = min(tokens, key=lambda each: (_rank(each), each))
        assert matcher.accept(token), matcher.fault
        text += bytes([token]) if token < 256 else b""
        assert len(text) < 2_000, text
    return text


def _rank(token: int) -> int:
    return FINISHING.index(token) if token in FINISHING else len(FINISHING)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(schemas, st.integers(0, MAX_RANDOM), st.integers(0, 2**32 - 1))
def test_whatever_is_sampled_under_a_schema_is_valid(
    compiler: Compiler, wanted: Any, num_random: int, seed: int
) -> None:
    """Wherever the noise stops, there is a way to the end, and what stands there is valid JSON."""
    matcher = matcher_of(compiler, schema(wanted))
    text = sampled(matcher, np.random.default_rng(seed), num_random)
    jsonschema.validate(json.loads(text.decode()), wanted)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True),
    st.integers(0, 2**32 - 1),
)
def test_whatever_is_sampled_of_a_choice_is_one_of_it(
    compiler: Compiler, choices: list[str], seed: int
) -> None:
    """Of any texts: quotes, controls, characters of four bytes."""
    matcher = matcher_of(compiler, spec("choice", json.dumps(choices)))
    text = sampled(matcher, np.random.default_rng(seed), MAX_RANDOM)
    assert text.decode() in choices
