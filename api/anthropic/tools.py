"""`tools` and `tool_choice` of a request in the form of OpenAI's, which `api.tools.request` reads:
so both APIs offer and enforce the same."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from api.anthropic.protocol import NULL, ToolChoice
from api.body import decode_field
from api.limits import MAX_TOOL_NAME_CHARS, MAX_TOOLS, MAX_TOOLS_BYTES
from api.prompts import decode_values
from engine.errors import InvalidRequestError, RequestError, UnsupportedFieldError


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: msgspec.Raw = NULL
    strict: bool | None = None
    type: str | None = None


_TOOL = msgspec.json.Decoder(_Tool).decode
_PARAMETERS = re.compile(r"(tools\[\d+\])\.function\.parameters")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function")


@contextmanager
def own_names() -> Iterator[None]:
    """What chat says of a tool, in Anthropic's names."""
    try:
        yield
    except RequestError as error:
        if not (error.param or "").startswith("tools["):
            raise
        renamed = type(error)(*(_renamed(str(text)) for text in error.args))
        renamed.code = error.code
        raise renamed from error


def _renamed(text: str) -> str:
    return _FUNCTION.sub(r"\1", _PARAMETERS.sub(r"\1.input_schema", text))


def as_functions(raw: msgspec.Raw) -> msgspec.Raw:
    """The tools of a request as OpenAI's `tools`.

    Raises:
        InvalidRequestError: one is malformed, or there are too many.
        UnsupportedFieldError: one is Anthropic's own, without a schema.
    """
    if raw == NULL:
        return NULL
    if len(raw) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools is over {MAX_TOOLS_BYTES} bytes long", "tools")
    values = decode_field(decode_values, raw, "tools")
    if len(values) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools holds {len(values)} tools; {MAX_TOOLS} are the most", "tools"
        )
    functions = [_as_function(value, f"tools[{i}]") for i, value in enumerate(values)]
    return msgspec.Raw(msgspec.json.encode(functions))


def _as_function(raw: msgspec.Raw, place: str) -> dict[str, Any]:
    tool = decode_field(_TOOL, raw, place)
    if tool.type not in (None, "custom"):
        raise UnsupportedFieldError(
            f"{place}: {tool.type[:40]} is a tool that Anthropic defines; this server takes tools"
            " with an input_schema",
            place,
        )
    if not 1 <= len(tool.name) <= MAX_TOOL_NAME_CHARS:
        raise InvalidRequestError(
            f"{place}.name has 1 to {MAX_TOOL_NAME_CHARS} characters", f"{place}.name"
        )
    if not bytes(tool.input_schema).startswith(b"{"):
        raise InvalidRequestError(
            f"{place}.input_schema must be a JSON schema, an object", f"{place}.input_schema"
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def as_choice(choice: ToolChoice | None) -> msgspec.Raw:
    """The choice of a request as OpenAI's `tool_choice`."""
    if choice is None:
        return NULL
    return msgspec.Raw(msgspec.json.encode(_as_choice(choice)))


def _as_choice(choice: ToolChoice) -> object:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequestError(
                    "tool_choice.name must say which tool", "tool_choice.name"
                )
            return {"type": "function", "function": {"name": choice.name}}
        case "auto" | "none":
            return choice.type
