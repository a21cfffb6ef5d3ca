"""Answers of chats that have more than content: tool calls, and thoughts apart.

Used by `chat`, and only where a request asks for either.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from api.markup import Markup
from api.message_parser import MessageEvent, MessageParser, Reasoning
from api.protocol import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from api.reasoning import ReasoningFamily
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

    @property
    def is_plain(self) -> bool:
        """Nothing: the text is the content."""
        return self.calls is None and self.thoughts is None

    def writers(self, count: int, *, is_thinking: bool) -> "list[MessageWriter]":
        """One for each choice; `is_thinking`: the prompt ends inside a thought."""
        return [MessageWriter(self, is_thinking=is_thinking) for _ in range(count)]

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


def plan(markup: Markup, tools: ToolRequest | None, include_reasoning: bool | None) -> MessagePlan:
    """What a request needs of this model.

    Raises:
        UnsupportedFieldError: it brings tools, and nobody knows how the model calls them.
    """
    if tools is not None and markup.calls is None:
        raise UnsupportedFieldError(
            "tools: this server does not know how its model writes tool calls: its chat template"
            " shows none that we can read; start it with --tool-call-parser",
            "tools",
        )
    call_token_ids = markup.call_token_ids if tools is not None else frozenset[int]()
    return MessagePlan(
        tools,
        markup.calls if tools is not None else None,
        markup.thoughts,
        include_reasoning is not False,
        call_token_ids | markup.thought_token_ids,
    )


class MessageWriter:
    """The message of one choice, whole or in deltas.

    Args:
        plan: of the request.
        is_thinking: the prompt ends inside a thought.
    """

    def __init__(self, plan: MessagePlan, *, is_thinking: bool) -> None:
        self._plan = plan
        self._parser = MessageParser(
            plan.calls,
            plan.tools.schemas if plan.tools is not None else {},
            plan.thoughts,
            is_thinking=is_thinking,
        )
        self._num_calls = 0

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's word for an answer that ends with calls."""
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def deltas(self, text: str, *, is_last: bool) -> list[ChatDelta]:
        """What more text adds to the message."""
        return [self._delta(event) for event in self._read(text, is_last)]

    def message(self, text: str) -> ChatMessage:
        """The message of the whole text."""
        events = list(self._read(text, True))
        content = "".join(event.text for event in events if isinstance(event, Text))
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = self._calls(events)
        shown: str | UnsetType = thought or UNSET
        return ChatMessage(
            "assistant",
            content if content or not (calls or thought) else None,
            reasoning=shown,
            reasoning_content=shown,
            tool_calls=calls or UNSET,
        )

    def _read(self, text: str, is_last: bool) -> Iterator[MessageEvent]:
        """What is shown of the events, counting calls as they pass."""
        events = self._parser.push(text) if text else []
        if is_last:
            events += self._parser.finish()
        for event in events:
            self._num_calls += isinstance(event, CallStart)
            if self._is_shown(event):
                yield event

    def _is_shown(self, event: MessageEvent) -> bool:
        match event:
            case Text():
                return True
            case Reasoning():
                return self._plan.shows_thoughts
            case CallStart() | Arguments():
                return self._num_calls <= self._max_calls

    @property
    def _max_calls(self) -> float:
        tools = self._plan.tools
        return 1 if tools is not None and not tools.is_parallel else float("inf")

    def _delta(self, event: MessageEvent) -> ChatDelta:
        match event:
            case Text(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case CallStart(name):
                function = FunctionCallDelta(name, "")
                call = ToolCallDelta(self._num_calls - 1, self._new_id(), "function", function)
                return ChatDelta(tool_calls=[call])
            case Arguments(text):
                function = FunctionCallDelta(arguments=text)
                return ChatDelta(tool_calls=[ToolCallDelta(self._num_calls - 1, function=function)])

    def _calls(self, events: Iterable[MessageEvent]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for event in events:
            if isinstance(event, CallStart):
                calls.append(ToolCall(self._new_id(), FunctionCall(event.name, "")))
            elif isinstance(event, Arguments):
                calls[-1].function.arguments += event.text
        return calls

    def _new_id(self) -> str:
        assert self._plan.calls is not None
        return self._plan.calls.new_call_id()
