"""The grammar of one answer to a conversation, put together: thought, calls, content. Pure.

    [thought] content                     content: response_format, structured_outputs
    [thought] calls                       calls that must be made
    [thought] text with calls             of tools that are strict
    [thought] (content | calls)           both, where the model may choose

Whatever is said of an answer holds for what follows the thought; a thought may be anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from api.reasoning import ReasoningFamily
from api.structured.fields import Wanted
from api.structured.lark import Grammar, TooLongError
from api.tools.binding import BoundTool, calls_only, text_with_calls
from api.tools.select import Family
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput

ThoughtState = Literal["open", "possible", "none"]
"""An answer begins inside a thought, or may begin with one, or has none any more."""

_SPACE = r"/[ \n]{0,2}/"
"""Between a thought and the answer: what the chat templates write."""


@dataclass(frozen=True, slots=True)
class Thought:
    """How an answer begins."""

    family: ReasoningFamily
    state: ThoughtState


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of an answer."""

    family: Family
    tools: Sequence[BoundTool]
    must: bool
    """Calls and nothing else."""

    many: bool
    """More than one."""

    is_bound: bool
    """Calls that the model chooses to make are bound too."""


def make(
    wanted: Wanted | None,
    calls: Calls | None,
    thought: Thought | None,
    tokens: Mapping[str, int],
) -> Wanted | None:
    """What binds an answer.

    Args:
        wanted: what the request says of the content.
        calls: of tools that the model may call, or must.
        thought: how the model's thoughts are marked, where they are told apart.
        tokens: of which the markers of calls and thoughts are made.

    Returns:
        With the field that is to blame where the engine does not take it; None: nothing binds it.

    Raises:
        InvalidRequestError: the wishes exclude each other, or are too much together.
    """
    if calls is not None and calls.must:
        if wanted is not None and not wanted.yields_to_calls:
            raise InvalidRequestError(
                f"{wanted.field} binds the answer's text, and with this tool_choice there is none:"
                " give one of the two",
                wanted.field,
            )
        wanted = None
    elif wanted is None and (calls is None or not calls.is_bound):
        return None
    has_thought = thought is not None and thought.state != "none"
    if wanted is not None and not has_thought and not _may_call_instead(calls):
        return wanted
    field = "tools" if wanted is None else wanted.field
    try:
        return Wanted(_written(wanted, calls, thought if has_thought else None, tokens), field)
    except TooLongError as error:
        raise InvalidRequestError(
            f"{field}: all schemas together make too long a grammar", field
        ) from error


def _written(
    wanted: Wanted | None, calls: Calls | None, thought: Thought | None, tokens: Mapping[str, int]
) -> StructuredOutput:
    grammar = Grammar(tokens)
    body = _body(grammar, wanted, calls)
    return grammar.output(
        body if thought is None else _after_thought(grammar, thought, calls, body)
    )


def _may_call_instead(calls: Calls | None) -> bool:
    """Whether content and calls can be told apart from their first token on."""
    return calls is not None and bool(calls.family.starts)


def _body(grammar: Grammar, wanted: Wanted | None, calls: Calls | None) -> str:
    """What follows the thought."""
    content = None if wanted is None else grammar.embedded(wanted.output)
    if calls is None or (content is not None and not _may_call_instead(calls)):
        assert content is not None
        return content
    blocks = calls.family.write_calls(grammar, calls.tools, calls.many)
    if content is None and not calls.must:
        return text_with_calls(grammar, blocks, many=calls.many)
    only_calls = calls_only(grammar, blocks, many=calls.many)
    return only_calls if content is None else f"({content} | {only_calls})"


def _after_thought(grammar: Grammar, thought: Thought, calls: Calls | None, body: str) -> str:
    family = thought.family
    # A scanner takes the beginning of a call for the end of the thought.
    forbidden = () if calls is None else calls.family.starts
    rest = f"{grammar.text_through(family.end, forbidden)} {grammar.terminal(_SPACE)}"
    if thought.state == "open":
        return f"{rest} {grammar.rule(body)}"
    return f"({grammar.marker(family.start)} {rest})? {grammar.rule(body)}"
