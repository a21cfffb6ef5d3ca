"""`input` of a response: a text, or items. Checked, bounded and in one form. Pure.

As in `prompts`, values are counted before anything is made of them, and of an item only the fields
that we know are decoded: all of them texts.
"""

from collections.abc import Callable
from typing import TypeVar, get_args

import msgspec

from api.body import decode_field
from api.ids import new_id
from api.limits import MAX_CALL_ID_CHARS, MAX_TOOL_NAME_CHARS, MAX_VALUES
from api.prompts import decode_values
from api.responses.items import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    Role,
    SummaryText,
)
from api.responses.packed_thought import unpack
from engine.errors import InvalidRequestError, NotFoundError, UnsupportedFieldError

T = TypeVar("T")

_NULL = msgspec.Raw(b"null")

_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}
_TEXT_TYPES = ("input_text", "output_text", "text")
_SERVED = "message, reasoning, function_call, function_call_output and item_reference"


class ItemNotFoundError(NotFoundError):
    """A request refers to an item that is not here: never was, or not any more."""

    code = "item_not_found"


class _RawItem(msgspec.Struct):
    """Any item. Others' fields are skipped over."""

    type: str | None = None
    """None: a message, as in OpenAI's easy form."""
    id: str | None = None
    role: str | None = None
    content: msgspec.Raw = _NULL
    summary: msgspec.Raw = _NULL
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: msgspec.Raw = _NULL


class _RawPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


_ITEM = msgspec.json.Decoder(_RawItem).decode
_PART = msgspec.json.Decoder(_RawPart).decode
_TEXT = msgspec.json.Decoder(str).decode


def read(raw: msgspec.Raw, find: Callable[[str], Item | None]) -> list[Item]:
    """The items of a request's `input`.

    Args:
        raw: the field.
        find: finds what a model wrote in earlier responses, by its name.

    Raises:
        InvalidRequestError: it is missing, empty or malformed, or holds too much.
        NotFoundError: it refers to an item that is not there.
        UnsupportedFieldError: it holds images, files, or items of built-in tools.
    """
    match bytes(raw).lstrip()[:1]:
        case b'"':
            text = decode_field(_TEXT, raw, "input")
            return [Message(new_id("msg_"), "user", [InputText(text)])] if text else _refuse_empty()
        case b"[":
            values = decode_field(decode_values, raw, "input")
        case _:
            raise InvalidRequestError("input is required: a text, or a list of items", "input")
    if not values:
        _refuse_empty()
    reader = _ItemReader(find)
    return [reader.read(value, f"input[{i}]") for i, value in enumerate(values)]


def _refuse_empty() -> list[Item]:
    raise InvalidRequestError("input must not be empty", "input")


class _ItemReader:
    """Reads the items of one request; parts are counted over all."""

    def __init__(self, find: Callable[[str], Item | None]) -> None:
        self._find = find
        self._num_parts = 0

    def read(self, raw: msgspec.Raw, place: str) -> Item:
        item = decode_field(_ITEM, raw, place)
        item_id = item.id or ""
        _check_length(item_id, f"{place}.id")
        match item.type:
            case None | "message":
                return self._read_message(item, item_id or new_id("msg_"), place)
            case "reasoning":
                return self._read_thought(item, item_id or new_id("rs_"), place)
            case "function_call":
                return FunctionCall(
                    item_id or new_id("fc_"),
                    _required_id(item.call_id, f"{place}.call_id"),
                    _function_name(item.name, f"{place}.name"),
                    item.arguments or "",
                )
            case "function_call_output":
                return FunctionCallOutput(
                    item_id or new_id("fco_"),
                    _required_id(item.call_id, f"{place}.call_id"),
                    self._read_output(item.output, f"{place}.output"),
                )
            case "item_reference":
                return self._look_up(item_id, f"{place}.id")
            case _:
                raise UnsupportedFieldError(
                    f"{place}.type: items of type {item.type[:40]} are not supported by this"
                    f" server; {_SERVED} are",
                    f"{place}.type",
                )

    def _look_up(self, item_id: str, place: str) -> Item:
        found = self._find(item_id)
        if found is None:
            raise ItemNotFoundError(
                f"{place}: there is no item {item_id[:80]!r} here (any more): items are kept with"
                " the response that they are in, by the API server that made it",
                place,
            )
        return found

    def _read_message(self, item: _RawItem, item_id: str, place: str) -> Message:
        role = _ROLES.get(item.role or "")
        if role is None:
            raise InvalidRequestError(
                f"{place}.role must be one of {', '.join(_ROLES)}, not {str(item.role)[:40]}",
                f"{place}.role",
            )
        make = _answer_part if role == "assistant" else _input_part
        content = f"{place}.content"
        parts: list[InputText | OutputText | Refusal]
        if bytes(item.content).startswith(b'"'):
            text = decode_field(_TEXT, item.content, content)
            parts = [OutputText(text) if role == "assistant" else InputText(text)]
        else:
            parts = self._read_parts(item.content, content, make)
        if not parts and role != "assistant":
            raise InvalidRequestError(f"{content} must be a text or a list of text parts", content)
        return Message(item_id, role, parts)

    def _read_thought(self, item: _RawItem, item_id: str, place: str) -> ReasoningItem:
        content = self._read_parts(item.content, f"{place}.content", _reasoning_part)
        if not content and (text := unpack(item.encrypted_content or "")):
            content = [ReasoningText(text)]
        summary = self._read_parts(item.summary, f"{place}.summary", _summary_part)
        return ReasoningItem(item_id, summary, content)

    def _read_output(self, raw: msgspec.Raw, place: str) -> str | list[InputText]:
        if bytes(raw).startswith(b'"'):
            return decode_field(_TEXT, raw, place)
        if raw == _NULL:
            raise InvalidRequestError(f"{place} must be a text or a list of text parts", place)
        return self._read_parts(raw, place, _input_part)

    def _read_parts(
        self, raw: msgspec.Raw, place: str, make: Callable[[_RawPart, str], T]
    ) -> list[T]:
        if raw == _NULL:
            return []
        if not bytes(raw).startswith(b"["):
            raise InvalidRequestError(f"{place} must be a list of text parts", place)
        values = decode_field(decode_values, raw, place)
        self._num_parts += len(values)
        if self._num_parts > MAX_VALUES:
            raise InvalidRequestError(f"input holds over {MAX_VALUES} parts", place)
        return [
            make(decode_field(_PART, value, f"{place}[{i}]"), f"{place}[{i}]")
            for i, value in enumerate(values)
        ]


# Whoever calls a text input or output, it is that of its role.


def _input_part(part: _RawPart, place: str) -> InputText:
    if part.type not in _TEXT_TYPES:
        raise _unsupported_part(part, place)
    return InputText(_required_text(part.text, f"{place}.text"))


def _answer_part(part: _RawPart, place: str) -> OutputText | Refusal:
    if part.type == "refusal":
        return Refusal(_required_text(part.refusal, f"{place}.refusal"))
    return OutputText(_input_part(part, place).text)


def _summary_part(part: _RawPart, place: str) -> SummaryText:
    if part.type != "summary_text":
        raise _unsupported_part(part, place)
    return SummaryText(_required_text(part.text, f"{place}.text"))


def _reasoning_part(part: _RawPart, place: str) -> ReasoningText:
    if part.type != "reasoning_text":
        raise _unsupported_part(part, place)
    return ReasoningText(_required_text(part.text, f"{place}.text"))


def _unsupported_part(part: _RawPart, place: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"{place}: parts of type {part.type[:40]} are not supported by this server", place
    )


def _required_text(text: str | None, place: str) -> str:
    if text is None:
        raise InvalidRequestError(f"{place} must be a string", place)
    return text


def _required_id(call_id: str | None, place: str) -> str:
    if not call_id:
        raise InvalidRequestError(f"{place} must be the id of a call", place)
    _check_length(call_id, place)
    return call_id


def _check_length(item_id: str, place: str) -> None:
    if len(item_id) > MAX_CALL_ID_CHARS:
        raise InvalidRequestError(f"{place} has at most {MAX_CALL_ID_CHARS} characters", place)


def _function_name(name: str | None, place: str) -> str:
    if not name or len(name) > MAX_TOOL_NAME_CHARS:
        raise InvalidRequestError(f"{place} has 1 to {MAX_TOOL_NAME_CHARS} characters", place)
    return name
