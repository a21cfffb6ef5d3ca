"""The text of an answer as a message: thoughts, content, and tool calls. Pure; used by the chat
route, and only where a request needs it.

    text -> reasoning -> tools -> Reasoning | Text | CallStart | Arguments
"""

from dataclasses import dataclass
from itertools import groupby

from api import reasoning
from api.reasoning import ReasoningFamily
from api.tools.base import CallStart, Event, Text, Tools
from api.tools.reader import Reader
from api.tools.select import Family


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks."""

    text: str


MessageEvent = Reasoning | Event


class MessageParser:
    """Follows the text of one answer.

    Args:
        family: how the model calls tools; None: what looks like a call is text.
        tools: those of the request.
        thinking: how the model marks its thoughts; None: they are text.
        is_thinking: the answer begins inside a thought.
    """

    def __init__(
        self,
        family: Family | None,
        tools: Tools,
        thinking: ReasoningFamily | None = None,
        *,
        is_thinking: bool = False,
    ) -> None:
        self._tools = None if family is None else family.parser(tools)
        self._events: list[MessageEvent] = []
        self._reader: Reader | None = None
        if thinking is not None:
            self._reader = Reader()
            self._steps = reasoning.scan(
                self._reader,
                self,
                thinking,
                is_open=is_thinking,
                also_ended_by=() if family is None else family.starts,
            )

    def push(self, text: str) -> list[MessageEvent]:
        """Take in more text, and return what is certain by now."""
        if self._reader is None:
            self.content(text)
        else:
            self._reader.add(text)
            next(self._steps, None)
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[MessageEvent]:
        """The text is over: return the rest. `is_cut`: a limit has ended it."""
        if self._reader is not None:
            self._reader.end()
            next(self._steps, None)
        if self._tools is not None:
            self._events += self._tools.finish(is_cut=is_cut)
        return self._take()

    def reasoning(self, piece: str) -> None:
        self._events.append(Reasoning(piece))

    def content(self, piece: str) -> None:
        if not piece:
            return
        if self._tools is None:
            self._events.append(Text(piece))
        else:
            self._events += self._tools.push(piece)

    def _take(self) -> list[MessageEvent]:
        events, self._events = self._events, []
        return merged(events)


def merged(events: list[MessageEvent]) -> list[MessageEvent]:
    """The same events with pieces that follow each other joined."""
    if len(events) < 2:
        return events
    joined: list[MessageEvent] = []
    for kind, group in groupby(events, type):
        if kind is CallStart:
            joined += group
        elif text := "".join(event.text for event in group if not isinstance(event, CallStart)):
            joined.append(kind(text))
    return joined
