"""`tools` and `tool_choice` of a response, as those of a chat: there a function is a layer deeper.

Built-in tools run on OpenAI's servers; here there are functions, which the client runs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.body import decode_field
from api.limits import MAX_TOOL_CHOICE_BYTES, MAX_TOOL_NAME_CHARS
from api.tools import request as tool_request
from api.tools.request import ToolRequest
from engine.errors import InvalidRequestError, RequestError, UnsupportedFieldError


class _Function(msgspec.Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, tag_field="type", tag="function"):
    """As chat's clients write it, and in that order: templates print it as it comes."""

    function: _Function


class _Kind(msgspec.Struct):
    type: str


class _Choice(msgspec.Struct):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list["_AllowedTool"] = []


class _AllowedTool(msgspec.Struct):
    type: str
    name: str | None = None


_CHATS_NAME = re.compile(r"tools\[(\d+)\]\.function")
_NULL = msgspec.Raw(b"null")
_KINDS = msgspec.json.Decoder(list[_Kind] | None).decode
_FUNCTIONS = msgspec.json.Decoder(list[_Function] | None).decode
_CHOICE = msgspec.json.Decoder(str | _Choice | None).decode


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request, and where they were in it."""

    shown: ToolRequest | None
    """What chat makes of them; None: there are none, or the model is not to know of them."""

    places: Sequence[int]
    """Of those that the model may call, in the client's list."""

    def renamed(self, error: RequestError) -> RequestError:
        """What chat says of a tool, in this route's names."""
        if not (error.param or "").startswith("tools["):
            return error
        found = type(error)(*(_CHATS_NAME.sub(self._name, str(text)) for text in error.args))
        found.code = error.code
        return found

    def _name(self, match: re.Match[str]) -> str:
        return f"tools[{self.places[int(match[1])]}]"


def read(tools: msgspec.Raw, choice: msgspec.Raw, is_parallel: bool | None) -> ResponseTools:
    """The tools of a request.

    Raises:
        InvalidRequestError: a field is malformed, too large, or names a tool that is not there.
        UnsupportedFieldError: a tool is no function, or a choice asks for one that is none.
    """
    functions = _read_functions(tools)
    places: Sequence[int] = range(len(functions))
    wish, allowed = _read_choice(choice)
    names = {function.name for function in functions}
    if allowed is not None:
        if missing := sorted(allowed - names):
            raise InvalidRequestError(
                f"tool_choice.tools: there is no tool {missing[0][:MAX_TOOL_NAME_CHARS]!r} in"
                " tools",
                "tool_choice.tools",
            )
        places = [i for i in places if functions[i].name in allowed]
        functions = [functions[i] for i in places]
    shown = msgspec.Raw(msgspec.json.encode([_Tool(f) for f in functions])) if functions else _NULL
    return ResponseTools(tool_request.read(shown, wish, is_parallel), places)


def _read_functions(raw: msgspec.Raw) -> list[_Function]:
    tool_request.check_size(raw)
    kinds = decode_field(_KINDS, raw, "tools") or []
    for i, tool in enumerate(kinds):
        if tool.type != "function":
            raise UnsupportedFieldError(
                f"tools[{i}].type: this server knows functions, which the client runs; it has no"
                f" {tool.type[:40]}",
                f"tools[{i}].type",
            )
    functions = decode_field(_FUNCTIONS, raw, "tools") or []
    for i, function in enumerate(functions):
        if not 1 <= len(function.name) <= MAX_TOOL_NAME_CHARS:
            place = f"tools[{i}].name"
            raise InvalidRequestError(f"{place} has 1 to {MAX_TOOL_NAME_CHARS} characters", place)
    return functions


def _read_choice(raw: msgspec.Raw) -> tuple[msgspec.Raw, set[str] | None]:
    """The choice as chat has it, and the names that it allows; None: all."""
    if len(raw) > MAX_TOOL_CHOICE_BYTES:
        raise InvalidRequestError(
            f"tool_choice is over {MAX_TOOL_CHOICE_BYTES} bytes long", "tool_choice"
        )
    choice = decode_field(_CHOICE, raw, "tool_choice")
    if not isinstance(choice, _Choice):
        return raw, None
    match choice.type:
        case "function":
            named = {"type": "function", "function": {"name": choice.name or ""}}
            return msgspec.Raw(msgspec.json.encode(named)), None
        case "allowed_tools" if choice.mode in ("auto", "required"):
            return msgspec.Raw(msgspec.json.encode(choice.mode)), _allowed_names(choice)
        case "allowed_tools":
            raise InvalidRequestError(
                "tool_choice.mode must be auto or required", "tool_choice.mode"
            )
        case _:
            raise _no_function(choice.type, "tool_choice.type")


def _allowed_names(choice: _Choice) -> set[str]:
    for i, tool in enumerate(choice.tools):
        if tool.type != "function":
            raise _no_function(tool.type, f"tool_choice.tools[{i}].type")
    return {tool.name or "" for tool in choice.tools}


def _no_function(kind: str, place: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"{place}: this server has no {kind[:40]}; functions can be chosen", place
    )
