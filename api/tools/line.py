"""Where a line begins. Used by the scanners of families whose calls have no markers."""

from api.tools.base import Sink
from api.tools.reader import Reader


class Line:
    """Watches a text on its way to the sink."""

    def __init__(self, sink: Sink) -> None:
        self.is_blank = True
        """Whether the last line is blank so far, so that a call may begin."""
        self._sink = sink

    def text(self, piece: str) -> None:
        _, line_break, end = piece.rpartition("\n")
        self.is_blank = (self.is_blank or bool(line_break)) and not end.strip()
        self._sink.text(piece)

    def no_call(self, reader: Reader) -> None:
        """As the sink's. What ends within the line may well be a text."""
        self._sink.no_call(reader, self.text)

    def skip_tag(self, reader: Reader, tag: str) -> None:
        """Leave out a marker that stands around calls. What follows it begins a line."""
        reader.take(len(tag))
        self._sink.marker()
        self.is_blank = True
