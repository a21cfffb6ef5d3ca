"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat request, checked. Used by the chat
route; which tools the model calls is up to the model."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from api.body import decode_field
from api.tools.base import Tools
from api.tools.json_scan import MAX_NAME_CHARS
from engine.errors import InvalidRequestError, UnsupportedFieldError

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20
MAX_TOOLS_VALUES = 1 << 16
"""Values in all schemas together, and about as many commas in their texts."""

_UNBOUND = (
    "needs output that is bound to a grammar, which this server does not do yet; with tool_choice"
    " auto the model chooses"
)


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted; the model sees it where its template shows it, and nothing enforces it yet."""


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedChoice(msgspec.Struct):
    type: Literal["function"]
    function: _NamedFunction


_NULL = msgspec.Raw(b"null")
_TOOLS = msgspec.json.Decoder(list[_Tool] | None).decode
_DEFINITIONS = msgspec.json.Decoder(list[dict[str, Any]]).decode
_CHOICE = msgspec.json.Decoder(str | _NamedChoice | None).decode


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Tools that the model may call."""

    definitions: list[dict[str, Any]]
    """As the client gave them, for the chat template."""

    schemas: Tools
    is_parallel: bool
    """More than one call in an answer."""


def read(tools: msgspec.Raw, choice: msgspec.Raw, is_parallel: bool | None) -> ToolRequest | None:
    """The tools of a request.

    Args:
        tools: the field, or null.
        choice: `tool_choice`, or null.
        is_parallel: `parallel_tool_calls`.

    Returns:
        None: there are none, or the model is not to know of them.

    Raises:
        InvalidRequestError: a field is malformed, too large, or names a tool that is not there.
        UnsupportedFieldError: the model would have to call a tool.
    """
    if tools == _NULL and choice == _NULL:
        return None
    found = _read_tools(tools)
    names = {tool.function.name: tool.function.parameters or {} for tool in found}
    if not _is_model_free(decode_field(_CHOICE, choice, "tool_choice"), names) or not found:
        return None
    return ToolRequest(_DEFINITIONS(tools), names, is_parallel is not False)


def check_size(raw: msgspec.Raw) -> None:
    """Bound the field before anything is made of it.

    Raises:
        InvalidRequestError: it is too long, or holds too many values.
    """
    if len(raw) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools is over {MAX_TOOLS_BYTES} bytes long", "tools")
    text = bytes(raw)
    if sum(text.count(char) for char in (b",", b"[", b"{")) > MAX_TOOLS_VALUES:
        raise InvalidRequestError(f"tools holds over {MAX_TOOLS_VALUES} values", "tools")


def _read_tools(raw: msgspec.Raw) -> list[_Tool]:
    check_size(raw)
    tools = decode_field(_TOOLS, raw, "tools") or []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools holds {len(tools)} tools; {MAX_TOOLS} are the most", "tools"
        )
    for i, tool in enumerate(tools):
        if not 1 <= len(tool.function.name) <= MAX_NAME_CHARS:
            place = f"tools[{i}].function.name"
            raise InvalidRequestError(f"{place} has 1 to {MAX_NAME_CHARS} characters", place)
    return tools


def _is_model_free(choice: str | _NamedChoice | None, names: Tools) -> bool:
    """Whether the model may call tools; no other wish can be granted yet."""
    match choice:
        case None | "auto":
            return True
        case "none":
            return False
        case "required":
            _check_is_there(bool(names), "required needs tools")
            raise UnsupportedFieldError(f"tool_choice: required {_UNBOUND}", "tool_choice")
        case _NamedChoice():
            name = choice.function.name
            _check_is_there(name in names, f"there is no tool {name[:MAX_NAME_CHARS]!r} in tools")
            raise UnsupportedFieldError(f"tool_choice: a named tool {_UNBOUND}", "tool_choice")
        case _:
            raise InvalidRequestError(
                "tool_choice must be auto, none, required or a function by its name, not"
                f" {choice[:40]!r}",
                "tool_choice",
            )


def _check_is_there(is_there: bool, message: str) -> None:
    if not is_there:
        raise InvalidRequestError(f"tool_choice: {message}", "tool_choice")
