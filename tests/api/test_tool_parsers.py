"""Tool calls of each family, in text that comes in pieces."""

import gc
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.message_parser import MessageParser, merged
from api.tools.base import Arguments, CallStart, Text
from api.tools.select import FAMILIES
from tests.helpers.message_events import TOOLS, cuts, feed, parse, texts

WEATHER = ("get_weather", '{"city": "Paris"}')
TIME = ("get_time", "{}")

TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
    '{"name": "get_time", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "get_time", "arguments": {}}]',
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>}"
    "<end_function_call><start_function_call>call:get_time{}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
    "<|tool_call>call:get_time{}<tool_call|>",
    "pythonic": '[get_weather(city="Paris"), get_time()]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
    "<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
"""What a model of each family writes."""

MORE_FORMS = {
    "llama4_json": '{"type": "function", "function": {"name": "get_weather", "parameters": '
    '{"city": "Paris"}}}\n{"function": {"name": "get_time", "parameters": {}}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}',
    "llama4_pythonic": '<|python_start|>[get_weather(city="Paris"), get_time()]<|python_end|>',
    "lfm2": "<|tool_call_start|>[get_weather(city='Paris'), get_time()]<|tool_call_end|>",
    "llama3_json": '<|python_tag|>{"type": "function", "function": "get_weather", "parameters": '
    '{"city": "Paris"}};{"parameters": {}, "name": "get_time"}',
    "hermes": '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}}</tool_call>'
    '<tool_call>{"name": "get_time"}',
    "qwen3_xml": "<function=get_weather><parameter=city>Paris</parameter></function>"
    "<function=get_time></function>",
}
"""What others of the family write, or the same ones on a bad day."""

every_family = pytest.mark.parametrize("family", TWO_CALLS)


@every_family
def test_calls_between_texts(family: str) -> None:
    """The text before and after them stays, white space next to them goes."""
    events = parse(family, f"Let me see.\n\n{TWO_CALLS[family]}\nThat is all. ")

    assert texts(events) == ["Let me see.", WEATHER, TIME, "That is all. "]


@pytest.mark.parametrize("family", MORE_FORMS)
def test_other_forms_of_calls(family: str) -> None:
    """One family has several ways to say the same."""
    assert texts(parse(family, MORE_FORMS[family])) == [WEATHER, TIME]


@every_family
def test_every_cut_gives_the_same_events(family: str) -> None:
    """Two pieces, cut at each place in turn; and one character after the other."""
    text = f"So: {TWO_CALLS[family]}" if family != "llama3_json" else TWO_CALLS[family]
    whole = parse(family, text)

    assert parse(family, *text) == whole
    for place in range(1, len(text)):
        assert parse(family, text[:place], text[place:]) == whole, text[:place]


FRAGMENTS = (
    *(f'{{"name": "{name}", "{key}": ' for name in ("get_time", "f") for key in ("arguments", "x")),
    *("get_time", "get_weather(", "city=", "days=3", "call:get_time{", "city:", "<parameter=city>"),
    *(
        "<function=get_time>",
        "function",
        "```json\n",
        "```",
        "\n",
        " ",
        "  \n",
        ", ",
        ":",
        ";",
        "=",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\\",
        "\\u00",
        "e9",
        "\\d",
        "\t",
        "True",
        "nul",
        "-1.5",
    ),
    *("é", "🙂", "text", "<", "<|", "<tool_c", "</tool", "[TOOL", "<｜tool", "x" * 300, "3" * 80),
)


@settings(max_examples=300)
@given(st.data())
def test_pieces_give_what_the_whole_text_gives(data: st.DataObject) -> None:
    """Whatever the text: good calls, broken ones, and beginnings of markers."""
    family = data.draw(st.sampled_from([*TWO_CALLS]))
    pieces = data.draw(cuts((*FRAGMENTS, *FAMILIES[family].markers * 4, TWO_CALLS[family])))

    assert parse(family, *pieces) == parse(family, "".join(pieces))


@every_family
def test_text_without_calls_stays_as_it_is(family: str) -> None:
    """White space included, and with beginnings of every marker."""
    beginnings = [m[:length] for m in FAMILIES[family].markers for length in range(1, len(m))]
    for text in ("", " ", " Hi! \n", 'a {"b": [1]} c', "{\n}", "[1, 2]", *beginnings):
        assert merged(parse(family, *text)) == ([Text(text)] if text else [])


@every_family
def test_text_that_is_no_call_is_not_held(family: str) -> None:
    """What is certain leaves at once; only what may become a marker waits."""
    parser = MessageParser(FAMILIES[family], TOOLS)
    marker = FAMILIES[family].markers[0]

    assert parser.push("Hello") == [Text("Hello")]
    assert parser.push(f", world{marker[:2]}") == [Text(", world")]
    assert parser.push("~") == [Text(f"{marker[:2]}~")]


@every_family
def test_arguments_leave_as_they_come(family: str) -> None:
    """A long text in an argument is streamed, not held to the end of the call."""
    parser = MessageParser(FAMILIES[family], TOOLS)
    before, _, _ = TWO_CALLS[family].partition("ris")
    events = parser.push(before)

    assert events[0] == CallStart("get_weather")
    assert [parser.push(word) for word in ("is ", "or", " Oslo")][1:] == [
        [Arguments("or")],
        [Arguments(" Oslo")],
    ]


NASTY = 'a "b" </tool_call> {[(,:;\\ ]}\t<｜tool▁call▁end｜> [ARGS] ünï 🙂\nend'
"""Quotes, brackets, markers and more, all inside one argument."""


def nasty_calls() -> dict[str, str]:
    """A call with that argument, as each family escapes it."""
    in_json = json.dumps(NASTY)
    return {
        "hermes": f'<tool_call>{{"name": "get_weather", "arguments": {{"city": {in_json}}}}}',
        "llama3_json": f'{{"name": "get_weather", "parameters": {{"city": {in_json}}}}}',
        "mistral": f'[TOOL_CALLS]get_weather[ARGS]{{"city": {in_json}}}',
        "deepseek_v31": f'<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{{"city": {in_json}}}',
        "gemma4": f'<|tool_call>call:get_weather{{city:<|"|>{NASTY}<|"|>}}<tool_call|>',
        "pythonic": f"[get_weather(city={NASTY!r})]",
        "qwen3_coder": f"<function=get_weather><parameter=city>{NASTY}</parameter></function>",
    }


@pytest.mark.parametrize("family", nasty_calls())
def test_brackets_quotes_and_markers_inside_strings_are_text(family: str) -> None:
    """However the family escapes them."""
    text = nasty_calls()[family]
    for pieces in ([text], [*text]):
        [(name, arguments)] = texts(parse(family, *pieces))
        assert (name, json.loads(arguments)) == ("get_weather", {"city": NASTY})


VALUES = {"city": "3", "days": 3, "exact": True, "where": {"a": [1, -2.5, None, {"b": []}]}}

WITH_VALUES = {
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>3<|"|>,days:3,exact:true,'
    'where:{a:[1,-2.5,null,{<|"|>b<|"|>:[]}]}}<tool_call|>',
    "pythonic": "[get_weather(city='3', days=3, exact=True, "
    "where={'a': (1, -2.5, None, {'b': [],},)},)]",
    "qwen3_coder": "<function=get_weather>\n<parameter=city>\n3\n</parameter>\n<parameter=days>\n3"
    "\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=where>\n"
    '{"a": [1, -2.5, null, {"b": []}]}\n</parameter>\n</function>',
}


@pytest.mark.parametrize("family", WITH_VALUES)
def test_other_notations_become_json(family: str) -> None:
    """With the right types: also where only the tool's schema tells them."""
    for pieces in ([WITH_VALUES[family]], [*WITH_VALUES[family]]):
        [(_, arguments)] = texts(parse(family, *pieces))
        assert json.loads(arguments) == VALUES


def test_value_that_its_schema_does_not_allow_is_a_text() -> None:
    """NaN is no JSON, and what is no number is what the model has written."""
    for value in ("NaN", "three", '"3"', "[3]"):
        text = f"<function=get_weather><parameter=days>{value}</parameter></function>"
        [(_, arguments)] = texts(parse("qwen3_coder", text))
        assert json.loads(arguments) == {"days": value}


def test_schema_that_is_none_makes_values_texts() -> None:
    """Clients send schemas of any shape: what cannot be understood decides nothing."""
    text = "<function=f><parameter=a>3</parameter></function>"
    strange: list[Any] = [None, [], 7, {"a": 7}, {"a": {"type": 7}}, {"a": {"type": ["x", {}]}}]
    for properties in strange:
        for schema in ({"properties": properties}, {"anyOf": [{"properties": properties}]}):
            parser = MessageParser(FAMILIES["qwen3_coder"], {"f": schema})
            assert texts(feed(parser, [text])) == [("f", '{"a": "3"}')]


BROKEN_BEFORE = {
    "hermes": [
        "<tool_call> no </tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>{}",
    ],
    "llama3_json": ['{"name": "unknown", "parameters": {}}', '{"name": "get_time"}', '{"a": 1}'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] none", "[TOOL_CALLS][1, 2]"],
    "gemma4": ["<|tool_call>", "<|tool_call>call:get_time()", "<|tool_call>get_time{}"],
    "functiongemma": ["<start_function_call>call:{}"],
    "pythonic": ["[get_time]", "[unknown()]", "[get_weather(Paris)]", '["get_time()"]'],
    "deepseek_v3": ["<｜tool▁call▁begin｜>get_time", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}"],
    "qwen3_coder": ["<tool_call>get_time", "<function=>", "<function=get_time"],
}


@pytest.mark.parametrize("family", BROKEN_BEFORE)
def test_what_is_no_call_after_all_is_text(family: str) -> None:
    """Whole, as the model has written it; and a call after it is still found."""
    for text in BROKEN_BEFORE[family]:
        assert texts(parse(family, *text)) == [text]
        assert texts(parse(family, f"{text}\n{TWO_CALLS[family]}"))[-2:] == [WEATHER, TIME]


def test_call_that_is_cut_off_has_the_arguments_so_far() -> None:
    """At the token limit: nothing is added that the model has not written."""
    for family, text in TWO_CALLS.items():
        before, _, _ = text.partition("ris")
        [(name, arguments)] = texts(parse(family, before))
        assert (name, arguments) == ("get_weather", '{"city": "Pa'), family


def test_broken_json_of_a_call_stays_in_its_arguments() -> None:
    """Up to the end marker; the text after it is text."""
    text = '<tool_call>{"name": "f", "arguments": {"a": @@}}</tool_call> Done.'

    assert texts(parse("hermes", text)) == [("f", '{"a": @@}}'), "Done."]


def test_missing_bracket_at_the_end_of_a_call_does_no_harm() -> None:
    """A usual mistake: the arguments are whole all the same."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> Done.'

    assert texts(parse("hermes", text)) == [("f", '{"a": 1}'), "Done."]


def test_arguments_in_a_string_are_the_json_in_it() -> None:
    """Some models escape their arguments twice; others have none and say so."""
    for written, meant in (
        (r'"{\"a\": \"\\n\"}"', r'{"a": "\n"}'),
        ('""', "{}"),
        ("null", "{}"),
        ("[1]", "[1]"),
    ):
        text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
        assert texts(parse("hermes", *text)) == [("f", meant)]


def test_usual_mistakes_inside_strings_are_mended() -> None:
    """A line break that is not escaped, and an escape that there is not."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "1\n2\t\\d+"}}</tool_call>'
    [(_, arguments)] = texts(parse("hermes", *text))

    assert json.loads(arguments) == {"a": "1\n2\t\\d+"}


def test_answer_that_is_json_is_no_call() -> None:
    """Where nothing but the form tells: it must begin a line and name a tool of the request."""
    for text in (
        '{"name": "Bob", "parameters": {}}',
        'See {"name": "get_time", "parameters": {}}',
        "```c\n{\n  int a;\n}\n```",
    ):
        assert parse("llama3_json", *text) == [Text(text)]
    for text in ("See [get_time()]", "[1]: https://example.org\n[2]"):
        assert parse("pythonic", *text) == [Text(text)]


@pytest.mark.row("S-13")
def test_nothing_in_a_pythonic_call_is_evaluated() -> None:
    """A name or an expression as an argument is broken JSON, and the rest is text."""
    for expression in (
        "open('/etc/passwd').read()",
        "__import__('os')",
        "f'{x}'",
        "1 + 1",
        "10**9",
    ):
        events = parse("pythonic", f"[get_weather(city={expression})]")
        assert events[0] == CallStart("get_weather")
        [arguments] = [event.text for event in events if isinstance(event, Arguments)]
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)


def test_deep_nesting_is_bounded() -> None:
    """A model that does nothing but open brackets fails no request."""
    for text in (
        "[get_weather(city=" + "[" * 20_000,
        "<|tool_call>call:get_weather{city:" + "[" * 20_000,
        '<tool_call>{"name": "f", "arguments": ' + "[" * 20_000,
    ):
        for family in ("pythonic", "gemma4", "hermes"):
            events = parse(family, text)
            carried = sum(len(e.text) for e in events if isinstance(e, Text | Arguments))
            assert 0 < carried <= len(text) or events == [CallStart("f")], family


def test_half_a_surrogate_pair_cannot_leave() -> None:
    """An escape may stand for what no UTF-8 can carry."""
    text = r'<tool_call>{"name": "f\ud800", "arguments": "\udc00"}</tool_call>'
    for event in parse("hermes", text):
        assert not isinstance(event, Text)
        (event.name if isinstance(event, CallStart) else event.text).encode()


def parse_s(family: str, num_words: int) -> float:
    """Processor time for so many words of text, and of an argument; the least of three."""
    before, _, after = TWO_CALLS[family].partition("Paris")
    words = ["word "] * num_words
    took_s = []
    for _ in range(3):
        began = time.process_time()
        parse(family, *words, "\n", before, *words, after)
        took_s.append(time.process_time() - began)
    return min(took_s)


@every_family
def test_time_is_linear_in_the_text(family: str) -> None:
    """Token by token, in texts and in arguments: four times the text is no sixteen times the
    work."""
    gc.disable()  # it would count the rest of the test run's objects
    try:
        assert parse_s(family, 4_000) < 9 * parse_s(family, 1_000)
    finally:
        gc.enable()
