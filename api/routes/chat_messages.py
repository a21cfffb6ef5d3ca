"""Answers of chats that have more than content: tool calls, and thoughts apart.

Used by `chat`, and only where a request asks for either.
"""

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from api.answer_bodies import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from api.message_parser import MessageEvent, Reasoning
from api.message_plan import MessagePlan, MessageReader
from api.tools.base import Arguments, CallStart, Text


class MessageWriter:
    """The message of one choice, whole or in deltas.

    Args:
        plan: of the request.
        is_thinking: the prompt ends inside a thought.
    """

    def __init__(self, plan: MessagePlan, *, is_thinking: bool) -> None:
        self._reader = MessageReader(plan, is_thinking=is_thinking)
        self._must_call = plan.must_call
        self._is_named = plan.tools is not None and plan.tools.choice == "named"

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's word for an answer that ends with calls: but for one that was asked for."""
        has_chosen = self._reader.num_calls and not self._is_named
        return "tool_calls" if reason == "stop" and has_chosen else reason

    def deltas(self, text: str, *, is_last: bool, is_cut: bool = False) -> list[ChatDelta]:
        """What more text adds to the message. `is_cut`: a limit has ended it."""
        events = self._reader.read(text, is_last=is_last, is_cut=is_cut)
        return [self._delta(event) for event in events]

    def message(self, text: str, *, is_cut: bool = False) -> ChatMessage:
        """The message of the whole text."""
        events = list(self._reader.read(text, is_last=True, is_cut=is_cut))
        content = "".join(event.text for event in events if isinstance(event, Text))
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = self._calls(events)
        shown: str | UnsetType = thought or UNSET
        return ChatMessage(
            "assistant",
            content if content or not (calls or thought or self._must_call) else None,
            reasoning=shown,
            reasoning_content=shown,
            tool_calls=calls or UNSET,
        )

    def _delta(self, event: MessageEvent) -> ChatDelta:
        index = self._reader.num_calls - 1
        match event:
            case Text(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case CallStart(name):
                function = FunctionCallDelta(name, "")
                call = ToolCallDelta(index, self._reader.new_call_id(), "function", function)
                return ChatDelta(tool_calls=[call])
            case Arguments(text):
                function = FunctionCallDelta(arguments=text)
                return ChatDelta(tool_calls=[ToolCallDelta(index, function=function)])

    def _calls(self, events: Iterable[MessageEvent]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for event in events:
            if isinstance(event, CallStart):
                calls.append(ToolCall(self._reader.new_call_id(), FunctionCall(event.name, "")))
            elif isinstance(event, Arguments):
                calls[-1].function.arguments += event.text
        return calls
