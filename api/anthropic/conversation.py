"""`system` and `messages` of a request as the messages that a chat template reads. Pure.

    user:       text…, tool_result…             -> tool…, user
    assistant:  thinking, text…, tool_use…      -> assistant
    system, and `system` of the request         -> system

As in Anthropic's API, turns of one role that follow each other are one turn. As in `api.prompts`,
values are counted before anything is made of them; of a block only fields that we know are decoded,
and those are texts, or stay as they are.
"""

from typing import Any, Literal, Protocol

import msgspec

from api.body import decode_field
from api.limits import MAX_CALL_ID_CHARS, MAX_VALUES
from api.prompts import decode_values
from engine.errors import InvalidRequestError, UnsupportedFieldError

BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a system block that Claude Code sends. It differs from request to request, is no business
of the model's, and would leave nothing in the prefix cache."""

_NULL = msgspec.Raw(b"null")


class GivenMessage(msgspec.Struct):
    """A message of a request."""

    role: Literal["user", "assistant", "system"]
    content: msgspec.Raw = _NULL
    """A text, or blocks."""


class _Block(msgspec.Struct):
    """Any block. Fields of others are skipped over."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = _NULL
    tool_use_id: str = ""
    tool_name: str = ""
    content: msgspec.Raw = _NULL


_MESSAGE = msgspec.json.Decoder(GivenMessage).decode
_BLOCK = msgspec.json.Decoder(_Block).decode
_TEXT = msgspec.json.Decoder(str).decode


class Template(Protocol):
    """What is asked of the chat template."""

    @property
    def takes_late_system(self) -> bool:
        """Whether it takes system messages behind others."""


def decode(raw: msgspec.Raw) -> list[GivenMessage]:
    """The messages of a request; what they hold is still to be read.

    Raises:
        InvalidRequestError: there are none or too many, or one has no role that we know.
    """
    values = decode_field(decode_values, raw, "messages")
    if not values:
        raise InvalidRequestError("messages must not be empty", "messages")
    return [decode_field(_MESSAGE, each, f"messages[{i}]") for i, each in enumerate(values)]


def read(
    system: msgspec.Raw, messages: list[GivenMessage], template: Template
) -> list[dict[str, Any]]:
    """What the chat template reads.

    Args:
        system: the field of the request.
        messages: from `decode`.
        template: if it takes no system messages behind others, they are added to the first.

    Raises:
        InvalidRequestError: a message is malformed, or the last one calls tools.
        UnsupportedFieldError: a block is no text, thought, call or result.
    """
    reader = _Reader(template)
    reader.add_system(system, "system")
    for i, message in enumerate(messages):
        reader.add(message, f"messages[{i}].content")
    return reader.messages()


class _Reader:
    def __init__(self, template: Template) -> None:
        self._template = template
        self._system: list[str] = []
        self._turns: list[_Turn] = []
        self._tool_names: dict[str, str] = {}
        """Of the calls so far, by id: some templates want them with the results."""
        self._num_blocks = 0

    def add(self, message: GivenMessage, place: str) -> None:
        match message.role:
            case "system":
                self.add_system(message.content, place)
            case "user":
                self._add_user(message.content, place)
            case "assistant":
                self._add_assistant(message.content, place)

    def add_system(self, raw: msgspec.Raw, place: str) -> None:
        if raw == _NULL and place == "system":
            return
        texts = [_text_of(block, where) for block, where in self._blocks(raw, place)]
        texts = [text for text in texts if not text.startswith(BILLING_HEADER)]
        if texts and self._turns and self._template.takes_late_system:
            self._turns.append(_Turn("system", texts))
        else:
            self._system += texts

    def messages(self) -> list[dict[str, Any]]:
        """All that was said, in the order in which it was said."""
        found = [turn.message() for turn in self._turns]
        if found and found[-1].get("tool_calls"):
            raise InvalidRequestError(
                "messages: the last one calls tools; add their results", "messages"
            )
        if self._system:
            return [_Turn("system", self._system).message(), *found]
        return found

    def _add_user(self, raw: msgspec.Raw, place: str) -> None:
        texts = []
        for block, where in self._blocks(raw, place):
            if block.type == "tool_result":
                self._add_result(block, where)
            else:
                texts.append(_text_of(block, where))
        if texts:
            self._turn("user").texts += texts

    def _add_result(self, block: _Block, place: str) -> None:
        _check_id(block.tool_use_id, f"{place}.tool_use_id")
        turn = _Turn("tool", call_id=block.tool_use_id)
        turn.name = self._tool_names.get(block.tool_use_id, "")
        if block.content != _NULL:
            blocks = self._blocks(block.content, f"{place}.content")
            turn.texts = [_result_text(each, where) for each, where in blocks]
        self._turns.append(turn)

    def _add_assistant(self, raw: msgspec.Raw, place: str) -> None:
        turn = self._turn("assistant")
        for block, where in self._blocks(raw, place):
            match block.type:
                case "thinking":
                    turn.thoughts.append(_required(block.thinking, f"{where}.thinking"))
                case "redacted_thinking":
                    pass  # readable by nobody but Anthropic
                case "tool_use":
                    turn.calls.append(self._call(block, where))
                case _:
                    turn.texts.append(_text_of(block, where))

    def _call(self, block: _Block, place: str) -> dict[str, Any]:
        _check_id(block.id, f"{place}.id")
        _check_id(block.name, f"{place}.name")
        self._tool_names[block.id] = block.name
        if not bytes(block.input).startswith(b"{"):
            raise InvalidRequestError(f"{place}.input must be an object", f"{place}.input")
        arguments = decode_field(_decode_utf8, block.input, f"{place}.input")
        function = {"name": block.name, "arguments": arguments}
        return {"id": block.id, "type": "function", "function": function}

    def _turn(self, role: str) -> "_Turn":
        """The one of this role that is under way, or a new one."""
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        return self._turns[-1]

    def _blocks(self, raw: msgspec.Raw, place: str) -> list[tuple[_Block, str]]:
        """The blocks of a content, and the place of each; a text is one block."""
        match bytes(raw)[:1]:
            case b'"':
                return [(_Block("text", decode_field(_TEXT, raw, place)), place)]
            case b"[":
                values = decode_field(decode_values, raw, place)
            case _:
                raise InvalidRequestError(f"{place} must be a text or a list of blocks", place)
        self._num_blocks += len(values)
        if self._num_blocks > MAX_VALUES:
            raise InvalidRequestError(f"messages hold over {MAX_VALUES} blocks", place)
        places = [f"{place}[{i}]" for i in range(len(values))]
        return [
            (decode_field(_BLOCK, value, where), where)
            for value, where in zip(values, places, strict=True)
        ]


class _Turn:
    """One message to be."""

    def __init__(self, role: str, texts: list[str] | None = None, call_id: str = "") -> None:
        self.role = role
        self.texts = texts or []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.call_id = call_id
        self.name = ""

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self._content()}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.role == "tool":
            message["tool_call_id"] = self.call_id
        if self.name:
            message["name"] = self.name
        return message

    def _content(self) -> str | list[dict[str, str]] | None:
        texts = [text for text in self.texts if text]
        if self.calls and not texts:
            return None
        if self.role == "user" and len(texts) > 1:  # templates have their own ways to join parts
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _text_of(block: _Block, place: str) -> str:
    if block.type == "text":
        return _required(block.text, f"{place}.text")
    if block.type == "image":
        raise UnsupportedFieldError(f"{place}: this server's model takes no images", place)
    raise UnsupportedFieldError(
        f"{place}: blocks of type {block.type[:40]} are not supported here", place
    )


def _result_text(block: _Block, place: str) -> str:
    """A tool that was looked up is told by its name: all tools are shown from the beginning."""
    return block.tool_name if block.type == "tool_reference" else _text_of(block, place)


def _required(text: str | None, place: str) -> str:
    if text is None:
        raise InvalidRequestError(f"{place} must be a string", place)
    return text


def _check_id(text: str, place: str) -> None:
    if not 1 <= len(text) <= MAX_CALL_ID_CHARS:
        raise InvalidRequestError(f"{place} has 1 to {MAX_CALL_ID_CHARS} characters", place)


def _decode_utf8(raw: bytes | msgspec.Raw) -> str:
    return bytes(raw).decode()
