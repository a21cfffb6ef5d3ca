"""What a request wants continued: the prompts of a completion, the messages of a chat. Checked, not
yet tokens. Used by the routes; text becomes tokens in `input_processor`.

A body may be megabytes long and still hold few values: texts. A decoder that is let loose on
megabytes of brackets makes millions of objects, and nothing else in the process runs meanwhile. So
values are counted, and what surrounds the texts is measured, before anything is made of them.
"""

from collections.abc import Callable
from functools import cache
from itertools import takewhile
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from api.body import decode_field
from api.chat_template import check_variables
from api.input_processor import InputProcessor
from api.limits import MAX_DOCUMENTS_BYTES, MAX_EXTRA_BYTES, MAX_PROMPTS, MAX_ROLE_CHARS, MAX_VALUES
from engine.errors import InvalidRequestError, UnsupportedFieldError

_FREE_BYTES = 64
"""What a message or a part needs besides its text, by which the bound grows."""
_FREE_CALL_BYTES = 256
"""What a call needs besides its arguments: an id and two names."""

_NULL = msgspec.Raw(b"null")

_REASONING = ("reasoning", "reasoning_content")
_MESSAGE_TEXTS = ("content", "tool_calls", *_REASONING)

_TEXTS = msgspec.json.Decoder(list[str]).decode
_TOKENS = msgspec.json.Decoder(list[int]).decode
_TOKEN_LISTS = msgspec.json.Decoder(list[list[int]]).decode
_TEXT = msgspec.json.Decoder(str).decode
_TEXT_OR_NULL = msgspec.json.Decoder(str | None).decode
_ARGUMENTS = msgspec.json.Decoder(str | dict[str, Any] | None).decode
_DOCUMENT = msgspec.json.Decoder(dict[str, str]).decode
_OBJECT_OR_NULL = msgspec.json.Decoder(dict[str, Any] | None).decode
_LIST = msgspec.json.Decoder(list[msgspec.Raw]).decode
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_ANYTHING = msgspec.json.Decoder(Any).decode


class _Texts(msgspec.Struct):
    """Where the texts of a message or a part are; other fields are skipped over."""

    content: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    tool_calls: msgspec.Raw = msgspec.Raw()
    reasoning: msgspec.Raw = msgspec.Raw()
    reasoning_content: msgspec.Raw = msgspec.Raw()


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = _NULL
    """A text that is JSON; some clients send the object."""


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


_TOOL_CALL = msgspec.json.Decoder(_ToolCall).decode
_TEXTS_OF = msgspec.json.Decoder(_Texts).decode


def read(
    raw: msgspec.Raw, inputs: InputProcessor, *, may_be_long: bool = False
) -> list[str | list[int]]:
    """The prompts of a completion request: each a text or a list of token ids.

    Args:
        raw: the field: a text, token ids, or a list of either.
        inputs: of the model.
        may_be_long: they are cut later.

    Raises:
        InvalidRequestError: it is missing, empty, something else, or holds too many.
        ContextLengthError: it is one list of more tokens than the model takes.
    """
    text = bytes(raw).lstrip()
    found = _read(text, inputs, may_be_long)
    if not found or not all(found):
        raise InvalidRequestError("prompt must not be empty", "prompt")
    _check_num_prompts(len(found))
    return found


def _read(text: bytes, inputs: InputProcessor, may_be_long: bool) -> list[str | list[int]]:
    if text.startswith(b'"'):
        return [decode_field(_TEXT, text, "prompt")]
    if not text.startswith(b"["):
        raise InvalidRequestError(
            "prompt is required: a text, token ids, or a list of either", "prompt"
        )
    match text[1:].lstrip()[:1]:
        case b'"':
            return _read_texts(text)
        case b"[":
            if b'"' not in text:  # then all brackets are those of prompts
                _check_num_prompts(text.count(b"[") - 1)
                return [*decode_field(_TOKEN_LISTS, text, "prompt")]
            return _read_each(text)
        case _:
            if not may_be_long:
                inputs.check_length(text.count(b",") + 1)
            token_ids = decode_field(_TOKENS, text, "prompt")
            return [token_ids] if token_ids else []


def _read_texts(text: bytes) -> list[str | list[int]]:
    """A list that begins with a text, and usually holds nothing else."""
    try:
        return [*_TEXTS(text)]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _read_each(text)


def _read_each(text: bytes) -> list[str | list[int]]:
    """A list of texts and lists of token ids."""
    values = decode_field(decode_values, text, "prompt")
    _check_num_prompts(len(values))
    return [_read_one(value, f"prompt[{i}]") for i, value in enumerate(values)]


def _read_one(raw: msgspec.Raw, place: str) -> str | list[int]:
    match bytes(raw)[:1]:
        case b'"':
            return decode_field(_TEXT, raw, place)
        case b"[":
            return decode_field(_TOKENS, raw, place)
        case _:
            raise InvalidRequestError(f"{place} must be a text or a list of token ids", place)


def _check_num_prompts(count: int) -> None:
    if count > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {count} prompts; {MAX_PROMPTS} are the most", "prompt"
        )


def decode_values(raw: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    """The values of a list, of which there may be `MAX_VALUES`."""
    if len(raw) <= 2 * MAX_VALUES:  # a value and a comma: there are no more
        return _LIST(raw)
    values = msgspec.structs.astuple(_bounded_list()(raw))
    return list(takewhile(lambda value: value is not UNSET, values))


@cache
def _bounded_list() -> Callable[[bytes | msgspec.Raw], msgspec.Struct]:
    """Decodes an object in the form of a list, which stops where it should have ended: a list type
    would go on to the end of one that is too long."""
    fields = [(f"_{i}", msgspec.Raw | UnsetType, UNSET) for i in range(MAX_VALUES)]
    kind = msgspec.defstruct("Values", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(kind).decode


def template_variables(raw: msgspec.Raw, reasoning_effort: str | None = None) -> dict[str, Any]:
    """What the template reads besides the conversation.

    Args:
        raw: `chat_template_kwargs`, which must not pretend to be fields of the request.
        reasoning_effort: the field; comes before a variable of that name. Some templates think
            only with `enable_thinking`, so that is set too, unless it is given.
    """
    name = "chat_template_kwargs"
    if len(raw) > MAX_EXTRA_BYTES:
        raise InvalidRequestError(f"{name} is over {MAX_EXTRA_BYTES} bytes long", name)
    variables = decode_field(_OBJECT_OR_NULL, raw, name) or {}
    check_variables(variables)
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
        variables.setdefault("enable_thinking", reasoning_effort != "none")
    return variables


def read_documents(raw: msgspec.Raw) -> list[dict[str, str]] | None:
    """The documents that a template may quote; None without any.

    Raises:
        InvalidRequestError: they are no list of objects with texts, or too many, or too long.
    """
    if raw == _NULL:
        return None
    if len(raw) > MAX_DOCUMENTS_BYTES:
        raise InvalidRequestError(
            f"documents is over {MAX_DOCUMENTS_BYTES} bytes long", "documents"
        )
    values = decode_field(decode_values, raw, "documents")
    return [
        decode_field(_DOCUMENT, value, f"documents[{i}]") for i, value in enumerate(values)
    ] or None


def read_messages(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """The messages of a chat. Keys that we do not know stay, for templates that do.

    Raises:
        InvalidRequestError: there are none or too many, or one has no role or no content.
        UnsupportedFieldError: a content is no text.
    """
    messages = decode_field(decode_values, raw, "messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    reader = _MessageReader()
    return [reader.read(message, f"messages[{i}]") for i, message in enumerate(messages)]


class _MessageReader:
    """Reads the messages of one chat; what may not grow without bounds is counted over all."""

    def __init__(self) -> None:
        self._num_parts = 0
        self._num_extra_bytes = 0

    def read(self, raw: msgspec.Raw, place: str) -> dict[str, Any]:
        message = self._read_object(raw, _MESSAGE_TEXTS, place)
        role = message.get("role")
        if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
            raise InvalidRequestError(
                f"{place}.role must be a string such as user", f"{place}.role"
            )
        for name in ("function_call", "audio"):
            if message.get(name):
                raise UnsupportedFieldError(
                    f"{place}.{name} is not supported by this server", f"{place}.{name}"
                )
        for name in _REASONING:
            if name in message:
                message[name] = decode_field(_TEXT_OR_NULL, message[name], f"{place}.{name}")
        calls = self._read_calls(message.pop("tool_calls", _NULL), f"{place}.tool_calls")
        content = message.get("content", _NULL)
        if calls and role != "assistant":
            raise InvalidRequestError(
                f"{place}: only messages of the assistant have tool_calls", f"{place}.tool_calls"
            )
        if calls:
            message["tool_calls"] = calls
        if calls and content == _NULL:
            message["content"] = None
        else:
            message["content"] = self._read_content(content, f"{place}.content")
        return message

    def _read_calls(self, raw: msgspec.Raw, place: str) -> list[dict[str, Any]]:
        if raw == _NULL:
            return []
        values = decode_field(decode_values, raw, place)
        self._count_parts(len(values), place)
        return [self._read_call(value, f"{place}[{i}]") for i, value in enumerate(values)]

    def _read_call(self, raw: msgspec.Raw, place: str) -> dict[str, Any]:
        call = decode_field(_TOOL_CALL, raw, place)
        name, arguments = call.function.name, call.function.arguments
        is_text = bytes(arguments).startswith(b'"')
        self._count_bytes(len(raw) - len(arguments) * is_text - _FREE_CALL_BYTES, place)
        value = decode_field(_ARGUMENTS, arguments, f"{place}.function.arguments")
        return {
            "id": call.id,
            "type": call.type,
            "function": {"name": name, "arguments": "" if value is None else value},
        }

    def _read_content(self, raw: msgspec.Raw, place: str) -> str | list[dict[str, Any]]:
        match bytes(raw).lstrip()[:1]:
            case b'"':
                return decode_field(_TEXT, raw, place)
            case b"[":
                parts = decode_field(decode_values, raw, place)
            case _:
                parts = []
        if not parts:
            raise InvalidRequestError(f"{place} must be a text or a list of text parts", place)
        self._count_parts(len(parts), place)
        return [self._read_part(part, f"{place}[{i}]") for i, part in enumerate(parts)]

    def _read_part(self, raw: msgspec.Raw, place: str) -> dict[str, Any]:
        if bytes(raw).startswith(b'"'):
            return {"type": "text", "text": decode_field(_TEXT, raw, place)}
        part = self._read_object(raw, ("text",), place)
        if not isinstance(kind := part.get("type"), str):
            raise InvalidRequestError(f"{place} must be a part with a type", place)
        if kind != "text":
            raise UnsupportedFieldError(
                f"{place}: parts of type {kind[:40]} are not supported by this server", place
            )
        if "text" not in part:
            raise InvalidRequestError(f"{place}.text must be a string", f"{place}.text")
        part["text"] = decode_field(_TEXT, part["text"], f"{place}.text")
        return part

    def _read_object(self, raw: msgspec.Raw, names: tuple[str, ...], place: str) -> dict[str, Any]:
        """An object in full, but for the fields of those names, which stay as they are and are
        free."""
        texts = decode_field(_TEXTS_OF, raw, place)
        num_free = _FREE_BYTES + sum(len(getattr(texts, name)) for name in names)
        self._count_bytes(len(raw) - num_free, place)
        fields = decode_field(_FIELDS, raw, place)
        return {
            key: value if key in names else decode_field(_ANYTHING, value, f"{place}.{key[:64]}")
            for key, value in fields.items()
        }

    def _count_parts(self, count: int, place: str) -> None:
        self._num_parts += count
        if self._num_parts > MAX_VALUES:
            raise InvalidRequestError(f"messages hold over {MAX_VALUES} parts", place)

    def _count_bytes(self, count: int, place: str) -> None:
        self._num_extra_bytes += max(0, count)
        if self._num_extra_bytes > MAX_EXTRA_BYTES:
            raise InvalidRequestError(
                f"{place}: messages hold over {MAX_EXTRA_BYTES} bytes besides their texts", place
            )
