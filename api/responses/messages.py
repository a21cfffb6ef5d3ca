"""Items as the messages that chat templates read. Pure.

What the model wrote in one go (a thought, a text, calls) is several items, and one message.
Templates know one system message, at the start: `instructions` and the system's or developer's
messages that come first are joined to one.
"""

from collections.abc import Sequence
from typing import Any

from api.responses.items import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    OutputText,
    ReasoningItem,
    Refusal,
)
from engine.errors import InvalidRequestError

_Part = InputText | OutputText | Refusal

_SYSTEM = ("system", "developer")


def to_messages(
    items: Sequence[Item], instructions: str | None, *, knows_developers: bool
) -> list[dict[str, Any]]:
    """The messages of a conversation.

    Args:
        items: from the first to the last.
        instructions: of this request.
        knows_developers: the template reads messages of developers; else they are the system's.

    Raises:
        InvalidRequestError: a result belongs to no call.
    """
    writer = _MessageWriter(knows_developers)
    if instructions:
        writer.add(Message("", "system", [InputText(instructions)]))
    for item in items:
        writer.add(item)
    return writer.messages


class _MessageWriter:
    def __init__(self, knows_developers: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self._knows_developers = knows_developers
        self._call_names: dict[str, str] = {}

    def add(self, item: Item) -> None:
        match item:
            case Message(role="assistant"):
                text = "".join(map(_text, item.content))
                self._assistant("content")["content"] = text
            case Message():
                self._add_message(item)
            case ReasoningItem():
                message = self._assistant("reasoning", "content", "tool_calls")
                message["reasoning"] = message["reasoning_content"] = item.text
            case FunctionCall():
                self._call_names[item.call_id] = item.name
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._assistant().setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                self._add_result(item)

    def _add_message(self, item: Message) -> None:
        role = item.role
        content = _content(item.content)
        if role in _SYSTEM:
            if len(self.messages) == 1 and self.messages[0]["role"] in _SYSTEM:
                before = self.messages[0]["content"]
                self.messages[0]["content"] = f"{_joined(before)}\n\n{_joined(content)}"
                return
            role = role if self._knows_developers else "system"
        self.messages.append({"role": role, "content": content})

    def _add_result(self, item: FunctionCallOutput) -> None:
        if item.call_id not in self._call_names:
            raise InvalidRequestError(
                f"input has an output for the call {item.call_id[:80]!r}, and no such"
                " function_call before it",
                "input",
            )
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": item.call_id,
                "name": self._call_names[item.call_id],
                "content": item.output if isinstance(item.output, str) else _content(item.output),
            }
        )

    def _assistant(self, *taken: str) -> dict[str, Any]:
        """The model's latest message if it is the last and has none of these yet, else a new
        one."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            latest = self.messages[-1]
            if all(not latest.get(name) for name in taken):
                return latest
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _content(parts: Sequence[_Part]) -> str | list[dict[str, Any]]:
    if len(parts) < 2:
        return "".join(map(_text, parts))
    return [{"type": "text", "text": _text(part)} for part in parts]


def _text(part: _Part) -> str:
    return part.refusal if isinstance(part, Refusal) else part.text


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
