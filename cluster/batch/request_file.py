"""The input of a batch. It is read twice, line by line: once to check it, once to send it."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cluster.batch.lines import Done, Line, parse_line
from engine.errors import ConfigError

_UTF8_MARK = b"\xef\xbb\xbf"
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of the input, without the empty ones."""

    total: int
    succeeded: int
    """Before this run."""
    failed: int
    """Likewise."""

    @property
    def pending(self) -> int:
        return self.total - self.succeeded - self.failed


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Open an input so that it can be read twice.

    Args:
        path: of a file; `-` is standard input. What comes out of a pipe is kept in a file without a
            name.

    Raises:
        ConfigError: it cannot be read.
    """
    with _open(path) as source:
        if source.seekable():
            yield source
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(source, copy)
            yield copy


def _open(path: str) -> BinaryIO:
    if path == "-":
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def read_lines(source: BinaryIO) -> Iterator[Line]:
    """All lines from the beginning, but for the empty ones."""
    source.seek(0)
    for number, content in enumerate(source, start=1):
        if number == 1:
            content = content.removeprefix(_UTF8_MARK)
        if content := content.strip():
            yield parse_line(number, content)


def check(source: BinaryIO, done: Done) -> Counts:
    """Count what is to be done.

    Raises:
        ConfigError: two lines have the same custom_id, or there is no line.
    """
    lines_by_id: dict[str, int] = {}
    twice = []
    outcomes = {True: 0, False: 0, None: 0}
    for line in read_lines(source):
        outcomes[done.success(line)] += 1
        if line.custom_id is None:
            continue
        first = lines_by_id.setdefault(line.custom_id, line.line)
        if first != line.line:
            twice.append(f"{line.custom_id!r} on lines {first} and {line.line}")
    if twice:
        rest = f", and {len(twice) - _MAX_SHOWN} more" if len(twice) > _MAX_SHOWN else ""
        raise ConfigError(f"each custom_id may come once: {', '.join(twice[:_MAX_SHOWN])}{rest}")
    if not (total := sum(outcomes.values())):
        raise ConfigError("there is no request in the input")
    return Counts(total, outcomes[True], outcomes[False])


def pending(source: BinaryIO, done: Done) -> Iterator[Line]:
    """The lines that have no result yet."""
    return (line for line in read_lines(source) if done.success(line) is None)
