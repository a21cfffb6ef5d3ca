"""Structural tags: text with parts that are bound, in the formats of xgrammar and of older vLLM."""

import json
from typing import Any

import pytest

from api.structured import structural_tag
from api.structured.schema import JsonStyle
from engine.errors import InvalidRequestError, RequestError, UnsupportedFieldError
from tests.helpers.grammar_walk import Language

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def language(form: dict[str, Any]) -> Language:
    return Language(read({"type": "structural_tag", "format": form}))


def read(tag: object) -> Any:
    return structural_tag.read(json.dumps(tag).encode(), "tag", JsonStyle())


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


CALL = tag("<f=a>", {"type": "json_schema", "json_schema": NUMBER}, "</f>")
OTHER = tag("<f=b>", {"type": "regex", "pattern": "[x/]+"}, "</f>")

FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (text("abc"), ["abc"], ["ab", "abcd"]),
    ({"type": "json_schema", "json_schema": NUMBER}, ['{"n": 1}'], ["{}"]),
    ({"type": "regex", "pattern": "a+/"}, ["aa/"], ["aa"]),
    ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab", "b"], ["a"]),
    ({"type": "any_text"}, ["", "what\never"], []),
    ({"type": "any_text", "excludes": ["no"]}, ["yes"], ["oh no"]),
    ({"type": "sequence", "elements": [text("a"), text("b")]}, ["ab"], ["a", "ba"]),
    ({"type": "or", "elements": [text("a"), text("b")]}, ["a", "b"], ["ab"]),
    (CALL, ['<f=a>{"n": 1}</f>'], ['<f=a>{"n": 1}', "<f=a></f>"]),
    (tag("<t>", {"type": "any_text"}, "</t>"), ["<t>a b</t>", "<t></t>"], ["<t></t>x"]),
    (tag("<t>", {"type": "any_text"}, [".", "!"]), ["<t>ab!", "<t>ab."], ["<t>ab"]),
    ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
    ({"type": "plus", "content": text("a")}, ["a", "aaa"], ["", "b"]),
    ({"type": "star", "content": text("a")}, ["", "aaa"], ["b"]),
    ({"type": "repeat", "content": text("a"), "min": 2, "max": 3}, ["aa", "aaa"], ["a", "aaaa"]),
    (
        {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL, OTHER]},
        ["hm", 'so <f=a>{"n": 1}</f> and <f=b>x/</f>!', "<f=b>x</f>"],
        ["so <f=c>", "<f=a>x</f>", "<f="],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<f="],
            "tags": [OTHER],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<f=b>x</f>", "so <f=b>x</f>"],
        ["so", "<f=b>x</f>!", "<f=b>x</f><f=b>x</f>"],
    ),
    (
        {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ", "},
        ["", "<f=b>x</f>", '<f=b>x</f>, <f=a>{"n": 2}</f>'],
        ["<f=b>x</f>,", "hm"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [OTHER],
            "separator": ";",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<f=b>x</f>"],
        ["", "<f=b>x</f>;<f=b>x</f>"],
    ),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FORMATS)
def test_format_allows_what_it_describes(
    form: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    """Alone, and what a walk through it finds is right again."""
    found = language(form)

    assert all(map(found.has, right)), [each for each in right if not found.has(each)]
    assert not any(map(found.has, wrong)), [each for each in wrong if found.has(each)]


def test_older_form_is_text_with_triggers() -> None:
    """As vLLM had it before there were formats."""
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=a>", "schema": NUMBER, "end": "</f>"}],
        "triggers": ["<f="],
    }
    found = Language(read(older))

    assert found.has('so <f=a>{"n": 1}</f> and <f=a>{"n": 2}</f>')
    assert found.has("no call at all")
    assert not found.may_begin("so <f=b")
    assert not found.has('<f=a>{"n": "x"}</f>')


REFUSED: list[tuple[object, str]] = [
    ({}, "tag"),
    ([], "tag"),
    ("x", "tag"),
    ({"format": 7}, "tag.format"),
    ({"format": {"type": "regex"}}, "tag.format.pattern"),
    ({"format": {"type": "json_schema", "json_schema": 7}}, "tag.format.json_schema"),
    (
        {"format": {"type": "json_schema", "json_schema": {"type": "banana"}}},
        "tag.format.json_schema.type",
    ),
    ({"format": {"type": "sequence", "elements": []}}, "tag.format.elements"),
    ({"format": {"type": "sequence", "elements": [{}]}}, "tag.format.elements[0].type"),
    ({"format": {"type": "token", "token": 7}}, "tag.format.type"),
    ({"format": {"type": "repeat", "content": text("a"), "max": 10**9}}, "tag.format.max"),
    ({"format": {"type": "repeat", "content": text("a"), "min": -1}}, "tag.format.min"),
    ({"format": text("a" * 5000)}, "tag.format.value"),
    ({"format": {"type": "any_text", "excludes": [""]}}, "tag.format.excludes"),
    ({"format": {"type": "triggered_tags", "triggers": [], "tags": [CALL]}}, "tag.format.triggers"),
    ({"format": {"type": "triggered_tags", "triggers": ["x"], "tags": [CALL]}}, "tag.format"),
    ({"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [7]}}, "tag.format.tags[0]"),
    ({"structures": [], "triggers": ["a"]}, "tag.structures"),
    ({"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]}, "tag.structures[0].schema"),
    ({"structures": [7], "triggers": ["a"]}, "tag.structures[0].begin"),
    ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}, "tag"),
]


@pytest.mark.parametrize(("form", "param"), REFUSED)
def test_malformed_tag_is_refused_by_name(form: object, param: str) -> None:
    """With the place of what is wrong in it."""
    with pytest.raises(RequestError) as caught:
        read(form)

    assert caught.value.param == param


def test_deep_and_long_tags_are_refused() -> None:
    """Before anything is made of them."""
    form: dict[str, Any] = text("a")
    for _ in range(70):
        form = {"type": "optional", "content": form}

    with pytest.raises(InvalidRequestError, match="deep"):
        read({"format": form})
    with pytest.raises(InvalidRequestError, match="bytes"):
        read({"format": {"type": "any_text", "x": "a" * 200_000}})
    with pytest.raises(UnsupportedFieldError, match="token"):
        read({"format": {"type": "exclude_token"}})
