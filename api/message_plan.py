"""What is looked for in the answers to a conversation, and what of it a client is shown.

    text of one choice -> message parser -> events -> MessageReader -> those that are shown

Used by all routes that take messages: each makes its own JSON of the events.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from api import answer_grammar
from api.answer_grammar import Calls, Thought, ThoughtState
from api.markup import Markup
from api.message_parser import MessageEvent, MessageParser, Reasoning
from api.reasoning import ReasoningFamily
from api.structured.fields import Wanted
from api.tools import select
from api.tools.base import Arguments, CallStart, Text
from api.tools.request import ToolRequest
from api.tools.select import Family
from engine.errors import UnsupportedFieldError


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """What is looked for in the answers of one request."""

    tools: ToolRequest | None
    calls: Family | None
    thoughts: ReasoningFamily | None
    shows_thoughts: bool
    kept_token_ids: frozenset[int]
    """Special tokens that must show in the text."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    """Of which markers are made."""

    @property
    def must_call(self) -> bool:
        """A grammar sees to it that the answer is calls and nothing else."""
        return self.tools is not None and self.tools.must_call

    @property
    def is_plain(self) -> bool:
        """Nothing: the text is the content."""
        return self.calls is None and self.thoughts is None

    def is_thinking(self, prompt: str, beginning: object) -> bool:
        """Whether answers begin inside a thought.

        Args:
            prompt: the rendered conversation.
            beginning: content of the message that is continued, or None.
        """
        if self.thoughts is None:
            return False
        if isinstance(beginning, str):
            return self.thoughts.is_open_in(beginning)
        return self.thoughts.is_open_after(prompt)

    def may_think(self, prompt: str, beginning: object) -> bool:
        """Whether answers begin inside a thought, or may begin with one. Arguments as above."""
        if self.thoughts is None:
            return False
        if isinstance(beginning, str):
            return self.thoughts.is_open_in(beginning)
        return self.thoughts.may_open_after(prompt)

    def grammar(
        self, wanted: Wanted | None, *, is_thinking: bool, may_think: bool
    ) -> Wanted | None:
        """What binds the answers, with all that the request says of their content.

        Raises:
            InvalidRequestError: the schema of a tool is broken, or wishes exclude each other.
        """
        if wanted is None and (self.tools is None or not self.tools.is_bound):
            return None
        thought = None
        if self.thoughts is not None:
            state: ThoughtState = "open" if is_thinking else "possible" if may_think else "none"
            thought = Thought(self.thoughts, state)
        return answer_grammar.make(wanted, self._calls(), thought, self.tokens)

    def _calls(self) -> Calls | None:
        tools = self.tools
        if tools is None or self.calls is None:
            return None
        return Calls(
            self.calls,
            tools.bound_tools(),
            must=tools.must_call,
            many=tools.is_parallel and tools.choice != "named",
            is_bound=tools.is_bound,
        )


def make(markup: Markup, tools: ToolRequest | None, include_reasoning: bool | None) -> MessagePlan:
    """What a request needs of this model.

    Raises:
        UnsupportedFieldError: it brings tools, and nobody knows how the model calls them.
    """
    if tools is not None and markup.calls is None and not tools.must_call:
        raise UnsupportedFieldError(
            "tools: this server does not know how its model writes tool calls: its chat template"
            " shows none that we can read; start it with --tool-call-parser and one of"
            f" {', '.join(select.FAMILIES)}",
            "tools",
        )
    call_token_ids = markup.call_token_ids if tools is not None else frozenset[int]()
    return MessagePlan(
        tools,
        (markup.calls or select.PLAIN) if tools is not None else None,
        markup.thoughts,
        include_reasoning is not False,
        call_token_ids | markup.thought_token_ids,
        markup.tokens,
    )


class MessageReader:
    """Follows the text of one choice, and says what its client is shown.

    Args:
        plan: of the request.
        is_thinking: the prompt ends inside a thought.
    """

    def __init__(self, plan: MessagePlan, *, is_thinking: bool) -> None:
        self.num_calls = 0
        """So far, those included that are not shown."""
        self._plan = plan
        self._parser = MessageParser(
            plan.calls,
            plan.tools.schemas if plan.tools is not None else {},
            plan.thoughts,
            is_thinking=is_thinking,
        )

    def read(self, text: str, *, is_last: bool, is_cut: bool = False) -> Iterator[MessageEvent]:
        """What more text means. `num_calls` counts each call as it passes.

        Args:
            text: the next piece.
            is_last: nothing follows it.
            is_cut: since the answer has become too long.
        """
        events = self._parser.push(text) if text else []
        if is_last:
            events += self._parser.finish(is_cut=is_cut)
        for event in events:
            self.num_calls += isinstance(event, CallStart)
            if self._is_shown(event):
                yield event

    def new_call_id(self) -> str:
        """An id for a call, in the form that the model's template takes."""
        assert self._plan.calls is not None
        return self._plan.calls.new_call_id()

    def _is_shown(self, event: MessageEvent) -> bool:
        match event:
            case Text():
                # Nothing but calls can have been written: it is half a marker or half a header.
                return not self._plan.must_call
            case Reasoning():
                return self._plan.shows_thoughts
            case CallStart() | Arguments():
                return self.num_calls <= self._max_calls

    @property
    def _max_calls(self) -> float:
        tools = self._plan.tools
        return 1 if tools is not None and not tools.is_parallel else float("inf")
