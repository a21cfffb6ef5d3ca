"""Tool calls in earlier messages, in the form that a chat template reads. Used by `chat_template`.

OpenAI's clients send arguments as a JSON text, and null where a message has calls and no content.
Templates differ: most print arguments as JSON and so want an object, DeepSeek's want the text; some
test whether the content is null, others print it. Which it is, a template is asked once.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequestError

_VALUE = "probed value"
_ARGUMENTS = {"probe": _VALUE}
_CALL_ID = "probe1234"
"""Nine letters and digits: Mistral's templates take no other."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """What a template wants to read."""

    has_objects: bool = True
    """Arguments as an object, or as a text."""

    no_content: str | None = ""
    """Instead of the content that a message with calls lacks."""

    def convert(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message in this form; one without calls as it is."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return {key: value for key, value in message.items() if key != "tool_calls"}
        return {
            **message,
            "content": message.get("content") or self.no_content,
            "tool_calls": [self._convert_call(call) for call in calls],
        }

    def _convert_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        arguments = function.get("arguments")
        convert = _as_object if self.has_objects else _as_text
        return {**call, "function": {**function, "arguments": convert(arguments)}}


def probe(render: Callable[[list[dict[str, Any]]], str]) -> CallForm:
    """Find out what a template wants.

    Args:
        render: renders messages; an InvalidRequestError says that it cannot.
    """
    for has_objects in (True, False):
        with_null = _render(render, CallForm(has_objects, None))
        with_empty = _render(render, CallForm(has_objects, ""))
        if _VALUE in with_null and with_null.count("None") <= with_empty.count("None"):
            return CallForm(has_objects, None)
        if _VALUE in with_empty:
            return CallForm(has_objects, "")
    return CallForm()


def _render(render: Callable[[list[dict[str, Any]]], str], form: CallForm) -> str:
    """The text of a conversation with a call; empty if it is not what a model should see."""
    function = {"name": "probe", "arguments": json.dumps(_ARGUMENTS)}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    answer = form.convert({"role": "assistant", "tool_calls": [call]})
    try:
        text = render([{"role": "user", "content": "probe"}, answer])
    except InvalidRequestError:
        return ""
    return "" if repr(_ARGUMENTS)[:8] in text else text


def _as_object(arguments: Any) -> Any:
    """What is no JSON object becomes an empty one: it is history, and to refuse it would end the
    conversation."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return arguments if isinstance(arguments, dict) else {}


def _as_text(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
