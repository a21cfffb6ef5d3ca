"""Text that comes in pieces, for scanners that are written as if it were all there.

A scanner is a generator. Where it needs text that has not come yet it yields, and goes on at the
same place when there is more. So it keeps no state of its own between two pieces, and cannot tell
where they were cut:

    def scan(reader):
        if (yield from reader.starts_with("<a>")):
            reader.take(3)
            yield from reader.until(("</a>",), print)
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Returns a T; yields where it needs more text."""

Write = Callable[[str], object]
"""Takes pieces of text."""


class BrokenError(Exception):
    """The text does not go on as the scanner needs it to."""


_SPACE = re.compile(r"\s+")


class Reader:
    """What has come and was not taken."""

    __slots__ = ("_is_over", "_place", "_record", "_text", "is_cut")

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._is_over = False
        self.is_cut = False
        """A limit has ended the text: more would have come."""
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        self._text = self._text[self._place :] + text
        self._place = 0

    def end(self, *, is_cut: bool = False) -> None:
        """Nothing more will come."""
        self._is_over = True
        self.is_cut = is_cut

    @property
    def is_at_end(self) -> bool:
        """All text has come and was taken."""
        return self._is_over and self._place == len(self._text)

    def record(self) -> None:
        """From here on, remember what is taken."""
        self._record = []

    def recorded(self) -> str:
        """What was taken since `record`, which ends here."""
        taken, self._record = "".join(self._record or ()), None
        return taken

    def take(self, num_chars: int) -> str:
        """The next characters, which are known to be there."""
        text = self._text[self._place : self._place + num_chars]
        self._place += num_chars
        if self._record is not None:
            self._record.append(text)
        return text

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """As much as matches of what is there; more of it may come."""
        match = pattern.match(self._text, self._place)
        return "" if match is None else self.take(match.end() - match.start())

    def peek(self) -> Steps[str]:
        """The next character, or nothing at the end of all text."""
        while self._place == len(self._text):
            if self._is_over:
                return ""
            yield
        return self._text[self._place]

    def peek_past_space(self) -> Steps[str]:
        """The same after white space, which is taken."""
        while (char := (yield from self.peek())).isspace():
            self.take_run(_SPACE)
        return char

    def whole_run(self, pattern: re.Pattern[str], max_chars: int | None = None) -> Steps[str]:
        """All that matches `pattern`, a class of characters repeated.

        Raises:
            BrokenError: it is longer than `max_chars`.
        """
        pieces: list[str] = []
        num_chars = 0
        while (yield from self.peek()) and (piece := self.take_run(pattern)):
            pieces.append(piece)
            num_chars += len(piece)
            if max_chars is not None and num_chars > max_chars:
                raise BrokenError
        return "".join(pieces)

    def starts_with(self, marker: str) -> Steps[bool]:
        """Whether the text goes on with `marker`, which is not taken."""
        while True:
            there = self._text[self._place : self._place + len(marker)]
            if len(there) == len(marker) or self._is_over or not marker.startswith(there):
                return there == marker
            yield

    def skips(self, marker: str) -> Steps[bool]:
        """Take `marker`, if the text goes on with it. At the end of all text the beginning of one
        is taken too: it is no marker, and nothing else either."""
        if (yield from self.starts_with(marker)):
            self.take(len(marker))
            return True
        if self._is_over and marker.startswith(self._text[self._place :]):
            self.take(len(self._text) - self._place)
        return False

    def until(
        self, markers: tuple[str, ...], write: Write, write_cut: Write | None = None
    ) -> Steps[str | None]:
        """Pass text on up to the first of `markers`, which is returned and not taken.

        What may be the beginning of a marker is held, and nothing else. None of the markers may be
        a part of another.

        Args:
            markers: what is looked for.
            write: takes the text.
            write_cut: takes the beginning of a marker with which all text ends; None: `write`.

        Returns:
            None at the end of all text.
        """
        pattern, held = _search(markers)
        while True:
            match = pattern.search(self._text, self._place)
            if match is not None:
                self._pass_on(match.start(), write)
                return match.group()
            tail = held.search(self._text, self._place)
            self._pass_on(len(self._text) if tail is None else tail.start(), write)
            if self._is_over:
                self._pass_on(len(self._text), write_cut or write)
                return None
            yield

    def pass_rest(self, write: Write) -> Steps[None]:
        """Pass on all that still comes."""
        while (yield from self.peek()):
            self._pass_on(len(self._text), write)

    def _pass_on(self, end: int, write: Write) -> None:
        if end > self._place:
            write(self.take(end - self._place))


@lru_cache(maxsize=64)
def _search(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for any of the markers, and for the beginning of one at the end of a text."""
    whole = "|".join(map(re.escape, markers))
    return re.compile(whole), re.compile(f"(?:{'|'.join(map(_beginning, markers))})\\Z")


def drop(piece: str) -> None:
    """For what nobody is to see."""


def _beginning(marker: str) -> str:
    """A pattern for all proper beginnings of a marker, but for the empty one: `a(?:b(?:c)?)?`."""
    if len(marker) == 1:
        return "(?!)"  # there are none
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(marker[0]) + pattern
