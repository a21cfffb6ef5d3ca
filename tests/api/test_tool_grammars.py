"""Calls that a grammar enforces: what the family's template writes is allowed, and whatever is
allowed is read back by the family's parser as calls that are valid."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from api import message_plan
from api.markup import Markup
from api.message_parser import MessageEvent, merged
from api.message_plan import MessageReader
from api.structured import schema
from api.structured.lark import Grammar
from api.structured.schema import JsonStyle
from api.tools import deepseek, gemma, hermes, mistral, qwen_coder, select
from api.tools.base import Arguments, CallStart, Event, Text
from api.tools.binding import ANY_ARGUMENTS, BoundTool, calls_only, text_with_calls
from api.tools.request import ToolRequest
from api.tools.select import Family
from engine.structured_output import StructuredOutput
from tests.helpers.grammar_walk import Language, marker_ids, tokenizer_with

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "is_long": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
ROUTE = {
    "type": "object",
    "properties": {
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "minItems": 1},
        "speed": {"type": ["number", "null"]},
        "how": {"anyOf": [{"const": "car"}, {"$ref": "#/$defs/stop"}]},
        "note": {"type": "string"},
    },
    "required": ["stops", "speed"],
    "additionalProperties": False,
    "$defs": {
        "stop": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "then": {"$ref": "#/$defs/stop"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "route": ROUTE, "now": NOTHING}

FAMILIES = {
    "hermes": (select.HERMES, hermes.MARKERS),
    "qwen3_coder": (select.QWEN_CODER, (qwen_coder.START, qwen_coder.END)),
    "llama3_json": (select.LLAMA, ()),
    "pythonic": (select.PYTHONIC, ()),
    "lfm2": (select.LFM2, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "mistral": (select.MISTRAL, (mistral.START,)),
    "mistral, new": (select.NEW_MISTRAL, mistral.MARKERS),
    "functiongemma": (select.FUNCTION_GEMMA, gemma.FUNCTION_GEMMA.markers),
    "gemma4": (select.GEMMA_4, gemma.GEMMA_4.markers),
    "deepseek_v3": (select.FAMILIES["deepseek_v3"], deepseek.MARKERS),
    "deepseek_v31": (select.DEEPSEEK, deepseek.MARKERS),
    "plain": (select.PLAIN, ()),
}
MARKED = [name for name in FAMILIES if name not in ("llama3_json", "pythonic", "plain")]

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}; '
    '{"name": "now", "parameters": {}}',
    "pythonic": '[weather(city="Oslo", days=3), now()]',
    "lfm2": '<|tool_call_start|>[weather(city="Oslo", days=3), now()]<|tool_call_end|>',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral, new": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]now[ARGS]{}',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}"
    "<end_function_call><start_function_call>call:now{}<end_function_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "plain": '[{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}, '
    '{"name": "now", "parameters": {}}]',
}

ENDINGS = ("\n</parameter>\n", "<escape>", '<|"|>')


def tokenizer_of(name: str, *, has_tokens: bool) -> Tokenizer:
    """With the markers as special tokens, or in letters."""
    return tokenizer_with(FAMILIES[name][1] if has_tokens else ())


def tools(*names: str, is_strict: bool = True) -> list[BoundTool]:
    style = JsonStyle()
    return [
        BoundTool(
            name,
            schema.checked(SCHEMAS[name], "tools", style) if is_strict else ANY_ARGUMENTS,
            style,
        )
        for name in names or SCHEMAS
    ]


@cache
def required(name: str, *, many: bool = True, has_tokens: bool = True) -> Language:
    """Calls and nothing else."""
    tokenizer = tokenizer_of(name, has_tokens=has_tokens)
    grammar = Grammar(marker_ids(tokenizer))
    blocks = FAMILIES[name][0].write_calls(grammar, tools(), many)
    output = grammar.output(calls_only(grammar, blocks, many=many))
    return Language(output, tokenizer, ENDINGS)


@cache
def optional(name: str, *, has_tokens: bool = True) -> Language:
    """Text with calls in it."""
    tokenizer = tokenizer_of(name, has_tokens=has_tokens)
    grammar = Grammar(marker_ids(tokenizer))
    blocks = FAMILIES[name][0].write_calls(grammar, tools(), True)
    output = grammar.output(text_with_calls(grammar, blocks, many=True))
    return Language(output, tokenizer, [*ENDINGS, WRITTEN[name]])


def read(
    family: Family, text: str, cut: int | None = None, *, is_cut: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The text around the calls, and the calls."""
    parser = family.parser(SCHEMAS)
    pieces: Sequence[str] = [text] if cut is None else [text[:cut], *text[cut:]]
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish(is_cut=is_cut)
    content, calls = "", []
    for event in events:
        match event:
            case Text(piece):
                content += piece
            case CallStart(name):
                calls.append((name, ""))
            case Arguments(piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return content, calls


def check_valid(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_grammar_allows_what_the_template_writes(name: str, has_tokens: bool) -> None:
    """Two calls, one of them without arguments; as tokens or spelled out, as the vocabulary has
    it."""
    language = required(name, has_tokens=has_tokens)

    assert language.has(WRITTEN[name])
    assert not language.has("It is sunny.")
    assert not language.may_begin(WRITTEN[name].replace("weather", "unknown"))
    assert not language.may_begin(WRITTEN[name].replace("3", "33"))


@pytest.mark.parametrize("name", FAMILIES)
def test_one_call_is_one_call(name: str) -> None:
    """Without parallel calls, or for a tool that was named, the first is the last."""
    language = required(name, many=False)
    _, calls = read(FAMILIES[name][0], WRITTEN[name])

    assert len(calls) == 2
    assert not language.has(WRITTEN[name])
    assert len(read(FAMILIES[name][0], language.any_text(1))[1]) == 1


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_parser_reads_back_whatever_the_grammar_allows(
    name: str, has_tokens: bool, seed: int
) -> None:
    """As calls of the tools, with arguments that are valid, and nothing around them; whole or in
    pieces."""
    text = required(name, has_tokens=has_tokens).any_text(seed)

    content, calls = read(FAMILIES[name][0], text)

    assert calls
    assert not content.strip()
    check_valid(calls)
    assert read(FAMILIES[name][0], text, cut=seed % len(text)) == (content, calls)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "plain"])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_calls_in_a_text_are_as_strict(name: str, has_tokens: bool, seed: int) -> None:
    """Where the model may choose, it may say anything; but if it calls, it calls a tool with valid
    arguments."""
    language = optional(name, has_tokens=has_tokens)

    check_valid(read(FAMILIES[name][0], language.any_text(seed))[1])
    assert language.has("It is sunny.")
    assert language.has("Let me look.\n" + WRITTEN[name])
    assert not language.may_begin("Let me look.\n" + WRITTEN[name].replace("3", "33"))


@pytest.mark.parametrize("name", MARKED)
def test_marker_in_a_text_is_bound_to_begin_a_call(name: str) -> None:
    """Whatever stands before it."""
    language = optional(name)
    start = WRITTEN[name][: WRITTEN[name].index("weather")]

    assert language.may_begin(f"a {start}weather")
    assert not language.may_begin(f"a {start}wetter")


@pytest.mark.parametrize("name", FAMILIES)
def test_tool_that_is_not_strict_takes_any_arguments(name: str) -> None:
    """Its name is bound all the same."""
    tokenizer = tokenizer_of(name, has_tokens=True)
    grammar = Grammar(marker_ids(tokenizer))
    blocks = FAMILIES[name][0].write_calls(grammar, tools("weather", is_strict=False), False)
    output = grammar.output(calls_only(grammar, blocks, many=False))
    language = Language(output, tokenizer, ENDINGS)

    for seed in range(5):
        (call,) = read(FAMILIES[name][0], language.any_text(seed))[1]
        assert call[0] == "weather"
        assert isinstance(json.loads(call[1]), dict)


def test_plain_calls_are_not_looked_for_beyond_their_list() -> None:
    """What is no call stays text."""
    assert read(select.PLAIN, "Hello [1]") == ("Hello [1]", [])
    assert read(select.PLAIN, '[{"name": "nobody", "parameters": {}}]') == (
        '[{"name": "nobody", "parameters": {}}]',
        [],
    )


def test_grammar_is_one_description() -> None:
    """Of the kind that holds all others."""
    assert isinstance(StructuredOutput("lark", Grammar().render('"a"')), StructuredOutput)


def first_marker(name: str) -> str:
    """With which calls begin, or nothing."""
    return next((m for m in FAMILIES[name][0].starts if WRITTEN[name].startswith(m)), "")


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_a_limit_cuts_leave_nothing_of_their_notation(name: str) -> None:
    """Wherever it does, beside calls or alone; what was to become an argument is the beginning of
    one. Half a first marker may be any text, and so may a call where there are no markers."""
    family, text = FAMILIES[name][0], WRITTEN[name]
    _, whole = read(family, text)
    for end in range(len(text)):
        content, calls = read(family, text[:end], is_cut=True)
        may_be_text = end < len(first_marker(name)) or name in ("llama3_json", "pythonic")
        assert content == (text[:end] if may_be_text and not calls else ""), text[:end]
        assert [tool for tool, _ in calls] == [tool for tool, _ in whole[: len(calls)]]
        for (_, arguments), (_, all_of_them) in zip(calls, whole, strict=False):
            assert all_of_them.startswith(arguments), text[:end]
    assert [tool for tool, _ in whole] == ["weather", "now"]


@pytest.mark.parametrize("name", FAMILIES)
def test_text_that_ends_after_a_call_leaves_nothing_of_the_notation(name: str) -> None:
    """Nor where nothing is known of a limit: a stop string may have ended it."""
    family, text = FAMILIES[name][0], WRITTEN[name]
    for end in range(len(text)):
        content, calls = read(family, text[:end])
        assert not calls or content == "", text[:end]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_whatever_must_be_calls_has_no_content_however_it_is_cut(
    name: str, has_tokens: bool, seed: int, data: st.DataObject
) -> None:
    """Whole and in pieces, and the two are the same."""
    text = required(name, has_tokens=has_tokens).any_text(seed)
    text = text[: data.draw(st.integers(0, len(text)))]
    size = data.draw(st.integers(1, 9))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]

    calls = [Arguments(""), *enforced(name, [text])]
    assert not any(isinstance(event, Text) for event in calls)
    assert merged([Arguments(""), *enforced(name, pieces)]) == merged(calls)


def enforced(name: str, pieces: Sequence[str]) -> list[MessageEvent]:
    """What a client is shown of calls that had to be made, and that a limit has cut."""
    tools = ToolRequest([], SCHEMAS, True, "required", tuple(SCHEMAS))
    nothing: frozenset[int] = frozenset()
    markup = Markup(FAMILIES[name][0], None, nothing, nothing)
    reader = MessageReader(message_plan.make(markup, tools, None), is_thinking=False)
    events = [event for piece in pieces for event in reader.read(piece, is_last=False)]
    return [*events, *reader.read("", is_last=True, is_cut=True)]


def test_arguments_leave_out_half_a_closing_marker() -> None:
    """They are cut too, and it is none of them."""
    for name, text, arguments in (
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nOslo\n</param", '{"city": "Oslo'),
        (
            "functiongemma",
            "<start_function_call>call:weather{city:<escape>Oslo<es",
            '{"city": "Oslo',
        ),
        ("functiongemma", "<start_function_call>call:weather{city:<es", '{"city": '),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {@</tool_', "{@"),
    ):
        assert read(FAMILIES[name][0], text, is_cut=True) == ("", [("weather", arguments)])


def test_texts_keep_all_of_their_characters_where_a_limit_cuts_them() -> None:
    """What may be the beginning of a marker may be any text."""
    for name, (family, markers) in FAMILIES.items():
        for text in ("a <", "a [", "1 < 2", *(f"a {marker[:3]}" for marker in markers)):
            assert read(family, text, is_cut=True) == (text, []), name
    answer = '{"answer": [1, 2, {"name": "Bo'
    assert read(select.LLAMA, answer, is_cut=True) == (answer, [])
