"""What a request wants continued: the prompts of a completion, the messages of a chat. Checked, not
yet tokens. Used by the routes; text becomes tokens in `input_processor`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from api.body import invalid_field
from api.chat_template import RESERVED
from engine.errors import InvalidRequestError, UnsupportedFieldError

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_ROLE_CHARS = 64

_TEXTS = msgspec.json.Decoder(list[str])
_TOKENS = msgspec.json.Decoder(list[int])
_TOKEN_LISTS = msgspec.json.Decoder(list[list[int]])


def read(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """The prompts of a completion request: each a text, or each a list of token ids.

    Each of the four forms is decoded as exactly what it looks like, so a mixed list is refused with
    the place of the first element that is out of line.

    Raises:
        InvalidRequestError: it is missing, empty, mixed, or holds too many.
    """
    text = bytes(raw).lstrip()
    try:
        found = _decode(text)
    except msgspec.ValidationError as error:
        raise invalid_field(error, "prompt") from error
    except (msgspec.DecodeError, RecursionError) as error:
        # Not looked into so far: a raw field is only skipped over.
        raise InvalidRequestError(f"prompt is no valid JSON: {error}", "prompt") from error
    if not found or not all(found):
        raise InvalidRequestError("prompt must not be empty", "prompt")
    if len(found) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(found)} prompts; {MAX_PROMPTS} are the most", "prompt"
        )
    return found


def _decode(text: bytes) -> list[str] | list[list[int]]:
    if text.startswith(b'"'):
        return [msgspec.json.decode(text, type=str)]
    if not text.startswith(b"["):
        raise InvalidRequestError(
            "prompt is required: a text, token ids, or a list of either", "prompt"
        )
    match text[1:].lstrip()[:1]:
        case b'"':
            return _TEXTS.decode(text)
        case b"[":
            return _TOKEN_LISTS.decode(text)
        case _:
            token_ids = _TOKENS.decode(text)
            return [token_ids] if token_ids else []


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Keys that we do not know stay, for templates that do.

    Raises:
        InvalidRequestError: there are none or too many, or one has no role or no content.
        UnsupportedFieldError: a content is no text, or a message calls tools.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages holds {len(messages)} messages; {MAX_MESSAGES} are the most", "messages"
        )
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, which must not pretend to be fields of the request."""
    variables = dict(given or {})
    if taken := sorted(variables.keys() & (RESERVED | {"self"})):
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {', '.join(taken)}", "chat_template_kwargs"
        )
    return variables


def _check_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise InvalidRequestError(f"{place}.role must be a string such as user", f"{place}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise UnsupportedFieldError(
                f"{place}.{name} is not supported by this server", f"{place}.{name}"
            )
    return {**message, "content": _check_content(message.get("content"), f"{place}.content")}


def _check_content(content: object, place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{place} must be a text or a list of text parts", place)
    return [_check_part(part, f"{place}[{i}]") for i, part in enumerate(content)]


def _check_part(part: object, place: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise InvalidRequestError(f"{place} must be a part with a type", place)
    if kind != "text":
        raise UnsupportedFieldError(
            f"{place}: parts of type {kind[:40]} are not supported by this server", place
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{place}.text must be a string", f"{place}.text")
    return part
