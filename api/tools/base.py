"""What all scanners of tool calls share: their events, and the parser that drives one.

A parser takes the text of one answer in pieces and says what it means. However the text is cut, the
events are the same, but for texts and arguments, which come in other pieces. Pure; used by
`api.message_parser`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from api.tools.reader import Reader, Steps, Write


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what the model says to its reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the latest call. Joined they are JSON, if the model has written
    JSON, and as it has written it."""

    text: str


Event = Text | CallStart | Arguments

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool that the model may call."""


class ToolParser(Protocol):
    """Follows the text of one answer."""

    def push(self, text: str) -> list[Event]:
        """Take in more text, and return what is certain by now."""

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """The text is over: return the rest. `is_cut`: a limit has ended it."""


class Sink:
    """Where a scanner puts what it finds. White space between a text and a call, or two calls, is
    nobody's: it is left out."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._space = ""
        """Follows the text so far, if more text does."""
        self._is_after_call = False
        """Or after a marker of calls; nothing but white space has come since."""

    def text(self, piece: str) -> None:
        if self._is_after_call:
            piece = piece.lstrip()
            self._is_after_call = not piece
        kept = piece.rstrip()
        if kept:
            self._events.append(Text(self._space + kept))
            self._space = piece[len(kept) :]
        else:
            self._space += piece

    def cut_marker(self, piece: str) -> None:
        """The beginning of a marker, with which all text ends. After a call another was to come;
        else it may be any text."""
        if not self._is_after_call:
            self.text(piece)

    def no_call(self, reader: Reader, write: Write | None = None) -> None:
        """What was recorded is no call, and so a text: unless it might have become a call where all
        text ends, and either a limit has ended it or a call stands before.

        Args:
            reader: has recorded it.
            write: takes the text, if it might be one where a limit has ended it too; None: `text`,
                of what a marker begins.
        """
        text = reader.recorded()
        is_doubtful = write is not None or not reader.is_cut
        if not reader.is_at_end or (is_doubtful and not self._is_after_call):
            (write or self.text)(text)

    def marker(self) -> None:
        """Calls follow, or have stood here."""
        self._is_after_call = True

    def call(self, name: str) -> None:
        self._space = ""
        self._is_after_call = True
        self._events.append(CallStart(name))

    def arguments(self, piece: str) -> None:
        self._events.append(Arguments(piece))

    def end(self) -> None:
        """No call follows any more."""
        if self._space:
            self._events.append(Text(self._space))

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


Scan = Callable[[Reader, Sink, Tools], Steps[None]]
"""The scanner of one family: reads to the end of the text."""


class ScanningParser:
    """A parser made of a scanner.

    Args:
        scan: of the model's family.
        tools: those of the request.
    """

    def __init__(self, scan: Scan, tools: Tools) -> None:
        self._reader = Reader()
        self._sink = Sink()
        self._steps = scan(self._reader, self._sink, tools)

    def push(self, text: str) -> list[Event]:
        self._reader.add(text)
        next(self._steps, None)
        return self._sink.take()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        self._reader.end(is_cut=is_cut)
        next(self._steps, None)
        self._sink.end()
        return self._sink.take()
