"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat request, checked. Used by the routes
that take messages: each puts its own tools into this form."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from api.body import decode_field
from api.limits import (
    MAX_SCHEMA_BYTES,
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    MAX_TOOLS_VALUES,
)
from api.structured.schema import JsonStyle, check_depth, checked
from api.tools import binding
from api.tools.base import Tools
from api.tools.binding import BoundTool
from engine.errors import InvalidRequestError
from engine.limits import MAX_SPEC_BYTES


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Calls that the model chooses to make have valid arguments."""


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

    choice: Literal["auto", "required", "named"] = "auto"
    """Whether the model may call a tool or must; of a named one there is exactly one call."""

    callable_names: tuple[str, ...] = ()
    """Where it must: which."""

    strict_names: frozenset[str] = frozenset()

    @property
    def must_call(self) -> bool:
        return self.choice != "auto"

    @property
    def is_bound(self) -> bool:
        """A grammar has to see to it."""
        return self.must_call or bool(self.strict_names)

    def bound_tools(self) -> list[BoundTool]:
        """The tools that may be called, for the grammar of calls. Takes milliseconds for long
        schemas.

        Raises:
            InvalidRequestError: a schema is broken, or a name cannot be written.
        """
        names = self.callable_names if self.must_call else tuple(self.schemas)
        bound = [name for name in names if self.must_call or name in self.strict_names]
        schemas = {name: msgspec.json.encode(self.schemas[name]) for name in bound}
        if sum(map(len, schemas.values())) > MAX_SPEC_BYTES:
            raise InvalidRequestError(
                f"tools: schemas that are to be enforced have at most {MAX_SPEC_BYTES} bytes"
                " together",
                "tools",
            )
        places = {name: f"tools[{i}].function" for i, name in enumerate(self.schemas)}
        return [self._bound(name, places[name], schemas.get(name)) for name in names]

    def _bound(self, name: str, place: str, raw: bytes | None) -> BoundTool:
        """A tool, with the JSON of its schema where that has to hold."""
        if binding.NAME.fullmatch(name) is None:
            raise InvalidRequestError(
                f"{place}.name: a name that is to be enforced has 1 to 64 letters, digits, dots,"
                " dashes and underscores",
                f"{place}.name",
            )
        is_strict = name in self.strict_names
        style = JsonStyle(is_strict=is_strict)
        if raw is None:
            return BoundTool(name, binding.ANY_ARGUMENTS, style)
        # Without parameters there are no arguments, says OpenAI's reference.
        schema = self.schemas[name] or binding.NO_ARGUMENTS
        place += ".parameters"
        if len(raw) > MAX_SCHEMA_BYTES:
            raise InvalidRequestError(f"{place} is over {MAX_SCHEMA_BYTES} bytes long", place)
        check_depth(raw, place)
        found = checked({"type": "object", **schema}, place, style)
        return BoundTool(name, found, style)


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
    """
    if tools == _NULL and choice == _NULL:
        return None
    found = _read_tools(tools)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in found}
    kind, names = _read_choice(decode_field(_CHOICE, choice, "tool_choice"), schemas)
    if kind == "none" or not found:
        return None
    return ToolRequest(
        _DEFINITIONS(tools),
        schemas,
        is_parallel is not False,
        kind,
        names,
        frozenset(tool.function.name for tool in found if tool.function.strict),
    )


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
        if not 1 <= len(tool.function.name) <= MAX_TOOL_NAME_CHARS:
            place = f"tools[{i}].function.name"
            raise InvalidRequestError(f"{place} has 1 to {MAX_TOOL_NAME_CHARS} characters", place)
    return tools


def _read_choice(
    choice: str | _NamedChoice | None, schemas: Tools
) -> tuple[Literal["none", "auto", "required", "named"], tuple[str, ...]]:
    """Whether tools may or must be called, and which."""
    match choice:
        case None | "auto":
            return "auto", ()
        case "none":
            return "none", ()
        case "required":
            _check_is_there(bool(schemas), "required needs tools")
            return "required", tuple(schemas)
        case _NamedChoice():
            name = choice.function.name
            _check_is_there(
                name in schemas, f"there is no tool {name[:MAX_TOOL_NAME_CHARS]!r} in tools"
            )
            return "named", (name,)
        case _:
            raise InvalidRequestError(
                "tool_choice must be auto, none, required or a function by its name, not"
                f" {choice[:40]!r}",
                "tool_choice",
            )


def _check_is_there(is_there: bool, message: str) -> None:
    if not is_there:
        raise InvalidRequestError(f"tool_choice: {message}", "tool_choice")
