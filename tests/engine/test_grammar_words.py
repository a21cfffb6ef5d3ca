"""Why a structured output is refused: in words for its client, as the real library finds it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.grammar.checker import Checker
from engine.structured_output import Kind, StructuredOutput


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker()
    yield checker
    checker.close()


def reason(checker: Checker, kind: Kind, text: str) -> str:
    """Why it is refused, without the name of its kind."""
    with pytest.raises(InvalidRequestError) as caught:
        checker.check(StructuredOutput(kind, text))
    return str(caught.value).removeprefix(f"{kind}: ")


OVERLAPPING = {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}

SCHEMAS: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "not cannot be enforced: leave it out, or send a response_form"),
    (
        {"properties": {"a": {"items": {"not": {}}}, "not": {"type": "string"}}},
        "not cannot be enforced at properties.a.items: leave it out",
    ),
    (
        {"properties": {"a": {"if": {}, "then": {}}}, "enum": [{"if": 1}]},
        "if and then cannot be enforced at properties.a",
    ),
    (OVERLAPPING, "oneOf cannot be enforced, since its branches may overlap: make them disjoint"),
    (
        {"properties": {"a": OVERLAPPING, "b": {"anyOf": [{"type": "null"}, OVERLAPPING]}}},
        "oneOf cannot be enforced at properties.a and properties.b.anyOf[1], since",
    ),
    ({"type": "string", "pattern": "a(?=b)"}, "the regular expression: look-around"),
    (
        {"properties": {"a": {"type": "string", "pattern": "b"}, "c": {"pattern": "a(?=b)"}}},
        "the regular expression at properties.c: look-around",
    ),
    (
        {"type": "string", "pattern": "^x", "format": "date"},
        "no text has the pattern, the format and the length that one place asks for together",
    ),
]


@pytest.mark.parametrize(("schema", "words"), SCHEMAS)
def test_what_a_schema_cannot_have_is_named_with_its_place(
    checker: Checker, schema: Any, words: str
) -> None:
    """And what to do; the library's own options are not for clients."""
    text = reason(checker, "json_schema", json.dumps(schema))

    assert text.startswith(words)
    assert "coerce" not in text
    assert "Unimplemented" not in text


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (r"ab(?=c)", "look-around, including look-ahead and look-behind, is not supported: '(?='"),
        (r"(a", "unclosed group: '('"),
        (r"(a)\1", r"backreferences are not supported: '\\1'"),
        (r"[b-a]", "invalid character class range, the start must be <= the end: 'b-a'"),
        ("a\nb(", "unclosed group: '('"),
    ],
)
def test_an_expression_is_refused_for_what_is_wrong_with_it(
    checker: Checker, expression: str, words: str
) -> None:
    """Not with the grammar that was made of it. The same inside of a grammar of the client's."""
    text = reason(checker, "regex", expression)
    assert text == words

    if "\n" not in expression:
        assert (
            reason(checker, "lark", f"start: /{expression}/") == f"the regular expression: {words}"
        )


def test_a_grammar_is_shown_where_it_is_wrong(checker: Checker) -> None:
    """Its client has written it."""
    assert 'unknown name: "b"' in reason(checker, "lark", "start: b")
