"""`response_format`, `structured_outputs` and `guided_*`: what each asks for, and what is refused
before anything is compiled, by name and at once."""

import json
import time
from typing import Any

import msgspec
import pytest

from api.structured import fields
from api.structured.fields import Wanted
from engine.errors import InvalidRequestError, RequestError
from tests.helpers.broken_schemas import BROKEN_SCHEMAS, DEEP_SCHEMA
from tests.helpers.grammar_walk import Language

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
ANNA = '{"name": "Anna", "age": 7}'


def read(**given: Any) -> Wanted | None:
    """As the route does: what is null is not given."""
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in given.items()}
    return fields.read(raw)


def language(**given: Any) -> Language:
    wanted = read(**given)
    assert wanted is not None
    assert wanted.field in given
    return Language(wanted.output)


def json_schema(schema: object, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


ACCEPTED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"any": [1, null]}', "[1]"),
    ({"response_format": json_schema(PERSON)}, ANNA, '{"age": 7}'),
    ({"response_format": json_schema(PERSON, strict=True)}, ANNA, "Anna"),
    ({"structured_outputs": {"json": PERSON}}, ANNA, '{"name": 7}'),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, ANNA, '{"name": 7}'),
    ({"structured_outputs": {"json_object": True}}, "{}", "7"),
    ({"structured_outputs": {"regex": r"a/b+\d"}}, "a/bb7", "a/bb"),
    ({"structured_outputs": {"choice": ["yes", 'no "or" so']}}, 'no "or" so', "maybe"),
    ({"structured_outputs": {"grammar": 'start: "a" B+\nB: /b/'}}, "abb", "a"),
    ({"structured_outputs": {"grammar": 'root ::= "a" b+\nb ::= "b"\n  | "c"'}}, "abc", "a"),
    ({"guided_json": PERSON}, ANNA, '{"name": 7}'),
    ({"guided_json": json.dumps(PERSON)}, ANNA, '{"name": 7}'),
    ({"guided_regex": "[ab]+"}, "abba", "c"),
    ({"guided_choice": ["red", "green"]}, "red", "blue"),
    ({"guided_grammar": 'root ::= "x" | "y"'}, "y", "z"),
]


@pytest.mark.parametrize(("given", "right", "wrong"), ACCEPTED)
def test_each_field_says_what_the_output_must_look_like(
    given: dict[str, Any], right: str, wrong: str
) -> None:
    """Under each of the names that OpenAI and vLLM have for it."""
    found = language(**given)

    assert found.has(right)
    assert not found.has(wrong)
    assert found.has(found.any_text(1))


@pytest.mark.parametrize("given", [{}, {"response_format": {"type": "text"}}])
def test_nothing_is_asked_for_by_text(given: dict[str, Any]) -> None:
    """Which is the default."""
    assert read(**given) is None


def test_text_leaves_room_for_other_fields() -> None:
    """It asks for nothing, so it contradicts nothing."""
    wanted = read(response_format={"type": "text"}, structured_outputs={"regex": "a"})

    assert wanted is not None
    assert wanted.field == "structured_outputs"


def test_a_misspelt_kind_is_named() -> None:
    """What is missing is not what the client would look for."""
    with pytest.raises(InvalidRequestError, match="structured_outputs has no 'regexp': give exact"):
        read(structured_outputs={"regexp": "a"})


def test_white_space_is_as_the_options_say() -> None:
    """None at all, or a pattern of the client's; else a line break or some spaces, since there are
    models that write white space without end."""
    text = '{\n  "name": "Anna"\n}'
    usual = language(structured_outputs={"json": PERSON})
    compact = language(structured_outputs={"json": PERSON, "disable_any_whitespace": True})
    own = language(guided_json=PERSON, guided_whitespace_pattern="[ _]")

    assert usual.has(text)
    assert not usual.may_begin('{\n\n  "name')
    assert compact.has('{"name":"Anna"}')
    assert not compact.has('{"name": "Anna"}')
    assert own.has('{_"name": "Anna"}')
    assert not own.has(text)


def test_objects_have_the_properties_that_they_name() -> None:
    """And no others, unless the schema says so; as in vLLM, and as everybody means it."""
    named = language(structured_outputs={"json": PERSON})
    opened = language(structured_outputs={"json": {**PERSON, "additionalProperties": True}})
    together = {"allOf": [PERSON, {"properties": {"size": {"type": "integer"}}}]}

    assert not named.has('{"name": "Anna", "size": 1}')
    assert opened.has('{"name": "Anna", "size": 1}')
    assert language(structured_outputs={"json": together}).has('{"name": "Anna", "size": 1}')
    closed = {"json": together, "disable_additional_properties": True}
    assert read(structured_outputs=closed) is not None


def test_strict_refuses_what_cannot_be_enforced() -> None:
    """And without it such a keyword is left out: OpenAI's difference between the two. Formats that
    nobody can enforce are annotations in either case."""
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    path = {"type": "string", "format": "path"}

    assert language(response_format=json_schema(tags)).has('["a", "b"]')
    with pytest.raises(AssertionError, match="uniqueItems"):
        language(response_format=json_schema(tags, strict=True))
    with pytest.raises(AssertionError, match="uniqueItems"):
        language(structured_outputs={"json": tags})
    assert language(response_format=json_schema(path, strict=True)).has('"/tmp"')


SCHEMA = "response_format.json_schema.schema"
BROKEN: list[tuple[object, str]] = [
    *((schema, f"{SCHEMA}{place}") for schema, place in BROKEN_SCHEMAS),
    (DEEP_SCHEMA, "response_format"),
    (False, SCHEMA),
    ("", SCHEMA),
    ("{}", SCHEMA),
    ([], SCHEMA),
    (7, SCHEMA),
    (None, SCHEMA),
]


@pytest.mark.row("S-23", "S-26")
@pytest.mark.parametrize(("schema", "param"), BROKEN)
@pytest.mark.parametrize("strict", [False, True])
def test_broken_schema_is_refused_where_it_is_broken(
    schema: object, param: str, strict: bool
) -> None:
    """Bug reports F01 and F04: a 400 that says where, in no time."""
    began = time.process_time()

    with pytest.raises(RequestError) as caught:
        read(response_format=json_schema(schema, strict=strict))

    assert caught.value.status == 400
    assert str(caught.value.param).startswith(param)
    assert time.process_time() - began < 0.2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": "{}"}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": None}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": 7}}}, "structured_outputs.json.type"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "  "}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a" * 70_000]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [7]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"grammar": "   "}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "a" * 70_000}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= " + "(" * 9000}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'a ::= "x"'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": ""}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": "a" * 5000}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": 7}, "guided_regex"),
    ({"guided_json": {"type": "banana"}}, "guided_json.type"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
]


@pytest.mark.row("S-23", "S-26")
@pytest.mark.parametrize(("given", "param"), REFUSED)
def test_bad_wish_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    """Empty ones, doubled ones, and ones of the wrong type (F04)."""
    began = time.process_time()

    with pytest.raises(RequestError) as caught:
        read(**given)

    assert caught.value.param == param
    assert time.process_time() - began < 0.2


def test_recursive_schema_is_right_where_it_can_end() -> None:
    """A tree is one."""
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}}

    tree = language(structured_outputs={"json": node})

    assert tree.has('{"next": {"next": {}}}')
    assert not tree.has('{"next": 1}')


def test_long_chain_of_references_takes_no_time() -> None:
    """However long, and in whatever order."""
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(999)}
    chain["a999"] = {"$ref": "#/$defs/a0"}
    for names in (list(chain), list(reversed(chain))):
        began = time.process_time()
        with pytest.raises(InvalidRequestError, match="nothing"):
            read(guided_json={"$ref": "#/$defs/a5", "$defs": {name: chain[name] for name in names}})
        assert time.process_time() - began < 0.2
