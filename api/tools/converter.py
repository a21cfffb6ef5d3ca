"""Other notations than JSON, turned into JSON while they come. Used by `gemma` and `pythonic`."""

import re
from collections.abc import Callable

from api.tools.json_scan import expect
from api.tools.reader import BrokenError, Reader, Steps, Write

_MAX_DEPTH = 64

NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
"""As JSON writes it."""


class Converter:
    """What all notations have in common.

    Args:
        reader: at a value.
        write: takes the JSON.
    """

    def __init__(self, reader: Reader, write: Write) -> None:
        self._reader = reader
        self._write = write
        self._depth = 0

    def convert_items(
        self, brackets: str, json_brackets: str, convert_item: Callable[[], Steps[None]]
    ) -> Steps[None]:
        """Convert what stands between brackets, with commas between the items.

        Raises:
            BrokenError: something else comes, or brackets nest too deeply.
        """
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise BrokenError
        yield from expect(self._reader, brackets[0])
        self._write(json_brackets[0])
        separator = ""
        while (yield from self._reader.peek_past_space()) != brackets[1]:
            self._write(separator)
            yield from convert_item()
            separator = ", "
            if (yield from self._reader.peek_past_space()) != ",":
                break
            self._reader.take(1)
        yield from expect(self._reader, brackets[1])
        self._write(json_brackets[1])
        self._depth -= 1
