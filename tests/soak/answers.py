"""What a client was told, in a form that does not depend on whether it was streamed, and whether it
was told properly: each choice ends once, and so does the stream."""

import json
import math
from dataclasses import dataclass, field
from typing import Any


class Improper(Exception):
    """An answer is not of the form that was promised."""


@dataclass(slots=True)
class Choice:
    """One of an answer."""

    text: str = ""
    ends: list[str] = field(default_factory=list)
    """Finish reasons; a proper choice has one."""
    stop_reason: object = None
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    """Token and value; -inf where there is none."""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Name and arguments of tools that are called."""

    def take(self, given: dict[str, Any]) -> None:
        """A choice of an event, or of an answer in one piece."""
        said = given.get("delta") or given.get("message") or {}
        self.text += given.get("text") or said.get("content") or ""
        for position, call in enumerate(said.get("tool_calls") or ()):
            parts = self.calls.setdefault(call.get("index", position), ["", ""])
            parts[0] += call["function"].get("name") or ""
            parts[1] += call["function"].get("arguments") or ""
        if given.get("finish_reason"):
            self.ends.append(given["finish_reason"])
            self.stop_reason = given.get("stop_reason")
        self._take_logprobs(given.get("logprobs") or {})

    def _take_logprobs(self, given: dict[str, Any]) -> None:
        for entry in given.get("content") or ():
            self.logprobs.append((entry["token"], entry["logprob"]))
        values = given.get("token_logprobs") or ()
        for token, value in zip(given.get("tokens") or (), values, strict=True):
            self.logprobs.append((token, -math.inf if value is None else value))


@dataclass(slots=True)
class Answer:
    """Of one request."""

    choices: dict[int, Choice] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: dict[str, Any] | None = None
    """What the server says went wrong, in the stream or instead of an answer."""
    is_done: bool = False
    """A stream has said that it is over."""

    def take(self, event: dict[str, Any]) -> None:
        """An event, or a whole answer.

        Raises:
            Improper: nothing may come any more.
        """
        if self.is_done or self.error is not None:
            raise Improper(f"something after the end: {json.dumps(event)[:200]}")
        if "error" in event:
            self.error = event["error"]
            return
        for given in event.get("choices") or ():
            choice = self.choices.setdefault(given["index"], Choice())
            if choice.ends:
                raise Improper(f"choice {given['index']} goes on after {choice.ends}")
            choice.take(given)
        if usage := event.get("usage"):
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_tokens = usage["completion_tokens"]

    def check_whole(self, num_choices: int) -> None:
        """Raises Improper unless all choices are there and each has one end."""
        if sorted(self.choices) != list(range(num_choices)):
            raise Improper(f"choices {sorted(self.choices)} of {num_choices}")
        for index, choice in self.choices.items():
            if len(choice.ends) != 1:
                raise Improper(f"choice {index} has the ends {choice.ends}")

    def difference(self, twin: "Answer", tolerance: float) -> str | None:
        """What is not as it was in an undisturbed answer to the same request; None if all is."""
        for name in ("num_prompt_tokens", "num_tokens"):
            if getattr(self, name) != getattr(twin, name):
                return f"{name}: {getattr(self, name)}, not {getattr(twin, name)}"
        for index, ours in self.choices.items():
            theirs = twin.choices[index]
            for name in ("text", "ends", "stop_reason", "calls"):
                if getattr(ours, name) != getattr(theirs, name):
                    return (
                        f"choice {index}, {name}: {getattr(ours, name)!r},"
                        f" not {getattr(theirs, name)!r}"
                    )
            if [token for token, _ in ours.logprobs] != [token for token, _ in theirs.logprobs]:
                return f"choice {index}: log probabilities of other tokens"
            for (token, value), (_, expected) in zip(ours.logprobs, theirs.logprobs, strict=True):
                if value != expected and not abs(value - expected) <= tolerance:
                    return f"choice {index}: log probability of {token!r} {value}, not {expected}"
        return None
