"""JSON as models write it: values copied while they come, and objects that say a call.

Copied is what the model has written, not what a decoder makes of it: a client sees the arguments
grow, and JSON that is broken stays visible as such. Only inside strings two usual mistakes are
mended, which every decoder refuses: line breaks that are not escaped, and escapes that there are
not (`"\\d"`).
"""

import json
import re
from collections.abc import Container

from api.limits import MAX_TOOL_NAME_CHARS
from api.tools.base import Sink
from api.tools.reader import BrokenError, Reader, Steps, Write

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_BETWEEN = re.compile(r"[\s,:+\-.0-9A-Za-z]+")
"""What stands between strings and brackets."""
_SCALAR = re.compile(r"[+\-.0-9A-Za-z]+")
_ESCAPES = '"\\/bfnrtu'

_CLOSERS = {"{": "}", "[": "]"}

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")


def expect(reader: Reader, char: str) -> Steps[None]:
    """Take `char`, after any white space."""
    if (yield from reader.peek_past_space()) != char:
        raise BrokenError
    reader.take(1)


def copy_value(reader: Reader, write: Write) -> Steps[None]:
    """Copy one value.

    Raises:
        BrokenError: brackets do not match, or there is something that no JSON has.
    """
    match (yield from reader.peek_past_space()):
        case '"':
            yield from copy_string(reader, write)
        case "{" | "[":
            yield from _copy_container(reader, write)
        case _:
            scalar = yield from reader.whole_run(_SCALAR)
            if not scalar:
                raise BrokenError
            write(scalar)


def _copy_container(reader: Reader, write: Write) -> Steps[None]:
    closers: list[str] = []
    while True:
        char = yield from reader.peek()
        if char == '"':
            yield from copy_string(reader, write)
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
            write(reader.take(1))
        elif char == closers[-1]:
            closers.pop()
            write(reader.take(1))
            if not closers:
                return
        elif between := reader.take_run(_BETWEEN):
            write(between)
        else:
            raise BrokenError


def copy_string(reader: Reader, write: Write) -> Steps[None]:
    """Copy a string with its quotes."""
    write(reader.take(1))
    while (char := (yield from reader.peek())) != '"':
        if char == "\\":
            reader.take(1)
            following = yield from reader.peek()
            write(char if following in _ESCAPES else char * 2)  # the end of the text is no mistake
            if following in _ESCAPES:
                write(reader.take(len(following)))
        elif plain := reader.take_run(_PLAIN):
            write(plain)
        elif char:
            write(escaped(reader.take(1)))
        else:
            raise BrokenError
    write(reader.take(1))


def read_string(reader: Reader, max_chars: int | None = None) -> Steps[str]:
    """The text that a string stands for."""
    if (yield from reader.peek_past_space()) != '"':
        raise BrokenError
    pieces: list[str] = []
    num_chars = 0

    def write(piece: str) -> None:
        nonlocal num_chars
        num_chars += len(piece)
        if max_chars is not None and num_chars > max_chars:
            raise BrokenError
        pieces.append(piece)

    yield from copy_string(reader, write)
    raw = "".join(pieces)
    try:
        text: str = json.loads(raw)
    except ValueError:  # \\u and no number
        text = raw[1:-1]
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent


def escaped(text: str) -> str:
    """A text as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonCall:
    """Reads a call that is an object with a name and arguments, in any order.

    Args:
        reader: at the object.
        sink: takes the call, as soon as its arguments begin.
        known: names of tools; None: any name will do.
        needs_arguments: without arguments it is no call.
    """

    def __init__(
        self,
        reader: Reader,
        sink: Sink,
        known: Container[str] | None = None,
        *,
        needs_arguments: bool = False,
    ) -> None:
        self.is_begun = False
        self.has_arguments = False
        """They are complete."""
        self._reader = reader
        self._sink = sink
        self._known = known
        self._needs_arguments = needs_arguments
        self._depth = 0
        self._name: str | None = None
        self._held: list[str] | None = None
        """Arguments that came before the name."""

    def read(self) -> Steps[None]:
        """Read the whole object.

        Raises:
            BrokenError: with `is_begun` the model has called something but not in good JSON; else
                it is no call, and the sink knows nothing of it.
        """
        yield from self._read_object()
        if not self.is_begun:
            self._end_without_arguments()

    def _read_object(self) -> Steps[None]:
        self._depth += 1
        yield from expect(self._reader, "{")
        if (yield from self._reader.peek_past_space()) != "}":
            yield from self._read_member()
            while (yield from self._reader.peek_past_space()) == ",":
                self._reader.take(1)
                yield from self._read_member()
        yield from expect(self._reader, "}")
        self._depth -= 1

    def _end_without_arguments(self) -> None:
        if self._name is None or self._needs_arguments:
            raise BrokenError
        self._begin(self._name)
        self._sink.arguments("{}")
        self.has_arguments = True

    def _read_member(self) -> Steps[None]:
        max_chars = None if self.is_begun else MAX_TOOL_NAME_CHARS
        key = yield from read_string(self._reader, max_chars)
        yield from expect(self._reader, ":")
        if key == "function" and (yield from self._is_definition()):
            yield from self._read_object()
        elif key in _NAME_KEYS and self._name is None:
            yield from self._read_name()
        elif key in _ARGUMENT_KEYS and not self.has_arguments:
            yield from self._read_arguments()
        else:
            yield from copy_value(self._reader, _ignore)

    def _is_definition(self) -> Steps[bool]:
        """Whether the call is wrapped as tools are in requests: `{"function": {"name": …}}`."""
        return (yield from self._reader.peek_past_space()) == "{" and self._depth == 1

    def _read_name(self) -> Steps[None]:
        name = yield from read_string(self._reader, MAX_TOOL_NAME_CHARS)
        if not name or (self._known is not None and name not in self._known):
            raise BrokenError
        self._name = name
        if self._held is not None:
            self._begin(name)
            self._sink.arguments("".join(self._held))

    def _read_arguments(self) -> Steps[None]:
        if self._name is None:
            self._held = []
            yield from copy_arguments(self._reader, self._held.append)
        else:
            # Not before something that may be arguments: until then it could still be a text.
            if not (yield from self._reader.peek_past_space()):
                raise BrokenError
            self._begin(self._name)
            yield from copy_arguments(self._reader, self._sink.arguments)
        self.has_arguments = True

    def _begin(self, name: str) -> None:
        self.is_begun = True
        self._reader.recorded()  # nothing will be given back
        self._sink.call(name)


def copy_arguments(reader: Reader, write: Write) -> Steps[None]:
    """Copy a value that stands for arguments: an object as it is, a string as the JSON in it, null
    as none."""
    match (yield from reader.peek_past_space()):
        case '"':
            text = yield from read_string(reader)
            write(text.strip() or "{}")
        case "n":
            pieces: list[str] = []
            yield from copy_value(reader, pieces.append)
            scalar = "".join(pieces)
            write("{}" if scalar == "null" else scalar)
        case _:
            yield from copy_value(reader, write)


def _ignore(piece: str) -> None:
    """For values that nobody asked for."""
