"""What is sent for each message, and what is remembered of the answer. Pure."""

from typing import Any, Protocol

Message = dict[str, str]


class Conversation(Protocol):
    """A kind of talk."""

    path: str
    """Of the route."""

    def ask(self, message: str) -> dict[str, Any]:
        """The fields of the request for what the user says next."""

    def end(self, answer: str) -> None:
        """Take note of the answer, as far as it came."""


class Chat:
    """Each message goes with all that was said before."""

    path = "/v1/chat/completions"

    def __init__(self, system_prompt: str | None = None) -> None:
        self.messages: list[Message] = []
        if system_prompt is not None:
            self._add("system", system_prompt)

    def ask(self, message: str) -> dict[str, Any]:
        self._add("user", message)
        return {"messages": list(self.messages)}

    def end(self, answer: str) -> None:
        """An answer that was broken off counts as far as it came. If nothing came, the message is
        forgotten: many templates refuse two in a row from the same side."""
        if answer:
            self._add("assistant", answer)
        else:
            self.messages.pop()

    def _add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


class Completions:
    """Each prompt stands by itself."""

    path = "/v1/completions"

    def ask(self, message: str) -> dict[str, Any]:
        return {"prompt": message}

    def end(self, answer: str) -> None:
        """Nothing is remembered."""
