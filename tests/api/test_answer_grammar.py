"""Thought, calls and content of one answer, bound together."""

import json

import pytest

from api import answer_grammar, reasoning
from api.answer_grammar import Calls, Thought, ThoughtState
from api.structured import options, schema
from api.structured.fields import Wanted
from api.structured.options import StructuredFields
from api.structured.schema import JsonStyle
from api.tools import select
from api.tools.binding import BoundTool
from api.tools.select import Family
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput
from tests.helpers.grammar_walk import Language, marker_ids, tokenizer_with

TOKENIZER = tokenizer_with(("<tool_call>", "</tool_call>"), ("<think>", "</think>"))
TOKENS = marker_ids(TOKENIZER)
THINK = reasoning.FAMILIES["qwen3"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
ANSWERS = {
    "json": (StructuredFields(json={"type": "object", "properties": {"a": {}}}), '{"a": 1}'),
    "regex": (StructuredFields(regex="a+/"), "aa/"),
    "choice": (StructuredFields(choice=["yes", "no"]), "no"),
    "lark": (StructuredFields(grammar='start: "x" Y\nY: /y+/'), "xyy"),
    "ebnf": (StructuredFields(grammar='root ::= "x" y\ny ::= "y" y | "z"'), "xyyz"),
}


def wanted(kind: str = "json", field: str = "response_format") -> Wanted:
    return Wanted(options.output(ANSWERS[kind][0]), field, field == "response_format")


def thought(state: ThoughtState) -> Thought:
    return Thought(THINK, state)


def calls(family: Family = select.HERMES, **options: bool) -> Calls:
    style = JsonStyle()
    arguments = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = BoundTool("f", schema.checked(arguments, "tools", style), style)
    return Calls(family, [tool], **{"must": False, "many": True, "is_bound": True, **options})


def language(found: Wanted | None) -> Language:
    assert found is not None
    return Language(found.output, TOKENIZER)


@pytest.mark.parametrize("kind", ANSWERS)
def test_content_is_bound_after_the_thought(kind: str) -> None:
    """Of each kind, where the answer begins inside a thought, may begin with one, or does not."""
    right = ANSWERS[kind][1]
    inside = language(answer_grammar.make(wanted(kind), None, thought("open"), TOKENS))
    before = language(answer_grammar.make(wanted(kind), None, thought("possible"), TOKENS))

    assert inside.has(f"Well.\nSo be it.</think>\n\n{right}")
    assert inside.has(f"</think>{right}")
    assert not inside.has(right)
    assert not inside.has("Well.</think>\n\nanything")
    assert before.has(f"<think>\nWell.\n</think>\n\n{right}")
    assert before.has(right)
    assert not before.has("anything")
    assert not before.may_begin("<think>Well.</think>anything")


@pytest.mark.parametrize("kind", ANSWERS)
def test_content_alone_stays_as_it_was_written(kind: str) -> None:
    """No grammar around it where there is no thought: the engine may know it already."""
    given = wanted(kind)

    assert answer_grammar.make(given, None, None, TOKENS) == given
    assert answer_grammar.make(given, None, thought("none"), TOKENS) == given


def test_calls_that_must_be_made_come_after_the_thought() -> None:
    """And nothing beside them."""
    found = language(answer_grammar.make(None, calls(must=True), thought("possible"), TOKENS))

    assert found.has(CALL)
    assert found.has(f"{CALL}\n{CALL}")
    assert found.has(f"<think>Well.</think>\n\n{CALL}")
    assert not found.may_begin("Well")
    assert not found.has("<think>Well.</think>")
    assert not found.may_begin("<think>Well<tool_call>")


def test_strict_tools_leave_the_model_its_choice() -> None:
    """It says what it likes, but calls with valid arguments only."""
    found = language(answer_grammar.make(None, calls(many=False), thought("open"), TOKENS))

    assert found.has("Well.</think>\n\nIt is late.")
    assert found.has(f"Well.</think>\n\nIt is late.\n{CALL}")
    assert not found.may_begin(f"Well.</think>{CALL}\n{CALL}")
    assert not found.may_begin("Well.</think>" + CALL.replace("1", '"1"'))


def test_calls_stand_in_for_content_where_the_model_may_choose() -> None:
    """An answer in the format that was asked for, or calls instead of one."""
    found = language(answer_grammar.make(wanted(), calls(is_bound=False), None, TOKENS))

    assert found.has('{"a": 1}')
    assert found.has(CALL)
    assert not found.has('{"a": 1}' + CALL)
    assert not found.has("It is late.")


def test_format_wins_where_calls_look_like_content() -> None:
    """Llama's have no marker of their own."""
    given = wanted()

    assert answer_grammar.make(given, calls(select.LLAMA, is_bound=False), None, TOKENS) == given
    found = language(answer_grammar.make(given, calls(select.LLAMA), thought("open"), TOKENS))
    assert found.has('</think>{"a": 1}')


def test_calls_that_must_be_made_win_over_a_response_format() -> None:
    """There is no content to have a format, so vLLM drops it; anything else that says what the text
    must look like contradicts."""
    found = answer_grammar.make(wanted(), calls(must=True), None, TOKENS)

    assert found is not None
    assert found.field == "tools"
    with pytest.raises(InvalidRequestError) as caught:
        answer_grammar.make(wanted(field="structured_outputs"), calls(must=True), None, TOKENS)
    assert caught.value.param == "structured_outputs"


def test_nothing_is_bound_that_need_not_be() -> None:
    """Tools that the model may call as it likes."""
    assert answer_grammar.make(None, calls(is_bound=False), thought("open"), TOKENS) is None
    assert answer_grammar.make(None, None, thought("open"), TOKENS) is None


def test_too_much_together_is_refused() -> None:
    """Each schema is short enough, all of them are not."""
    style = JsonStyle()
    long = [
        {"type": "object", "properties": {"a": {"enum": ["x" * 60_000 + str(i)]}}} for i in range(9)
    ]
    tools = [BoundTool(f"f{i}", each, style) for i, each in enumerate(long)]

    with pytest.raises(InvalidRequestError) as caught:
        answer_grammar.make(
            None, Calls(select.HERMES, tools, must=True, many=True, is_bound=True), None, TOKENS
        )
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("prompt", "is_open", "may_open"),
    [
        ("<|assistant|>\n", False, True),
        ("<|assistant|>\n<think>\n", True, True),
        ("<|assistant|>\n<think>\n\n</think>\n\n", False, False),
    ],
)
def test_prompt_tells_whether_a_thought_may_come(
    prompt: str, is_open: bool, may_open: bool
) -> None:
    """A template that closes it says that the model does not think."""
    assert THINK.is_open_after(prompt) is is_open
    assert THINK.may_open_after(prompt) is may_open


def test_every_kind_has_its_answer() -> None:
    """A new kind of description needs a way to stand behind a thought."""
    kinds = {wanted(kind).output.kind for kind in ANSWERS}

    assert kinds == set(StructuredOutput.__annotations__["kind"].__args__)
    assert json.loads(CALL.split("\n")[1])
