"""The events of one response's stream: numbered, encoded, and in order.

    event: response.output_text.delta
    data: {"item_id":"msg_…","delta":"Hi",…,"sequence_number":4}

Nearly all of them are deltas that differ in a text and a number: the rest is encoded once.
"""

from typing import Protocol

import msgspec

from api import sse
from api.ids import new_id
from api.responses.protocol import (
    ArgumentsDelta,
    Event,
    ReasoningDelta,
    TextDelta,
)

_encode = msgspec.json.Encoder().encode

_MARK = new_id("text ", num_bits=128)
"""Stands for a text while what surrounds it is encoded. Nobody else can have come upon it."""
_NUMBER = b'"sequence_number":0}\n\n'
"""How the events end, before they have a number."""

Delta = TextDelta | ReasoningDelta | ArgumentsDelta


class EventWriter(Protocol):
    """Where the events of a response go."""

    def add(self, event: Event) -> None:
        """One more event."""

    def add_delta(self, delta: Delta) -> None:
        """One more piece of a text."""


class NoEvents:
    """An `EventWriter` for a response that is not streamed."""

    def add(self, event: Event) -> None:
        pass

    def add_delta(self, delta: Delta) -> None:
        pass


class EventLog:
    """An `EventWriter` that encodes and keeps them until they are taken."""

    def __init__(self) -> None:
        self._num_events = 0
        self._events: list[bytes] = []
        self._around: tuple[str, bytes, bytes] = ("", b"", b"")
        """Of the item whose deltas are coming: its id, and what surrounds the text."""

    def add(self, event: Event) -> None:
        event.sequence_number = self._num_events
        self._append(_encode_event(event))

    def add_delta(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta) and delta.logprobs:
            self.add(delta)
            return
        if self._around[0] != delta.item_id:
            self._around = (delta.item_id, *_around(delta))
        _, before, after = self._around
        number = str(self._num_events).encode()
        self._append(
            b'%b%b%b"sequence_number":%b}\n\n' % (before, _encode(delta.delta), after, number)
        )

    def take(self) -> list[bytes]:
        """What has come since the last call; each event by itself."""
        events, self._events = self._events, []
        return events

    def _append(self, event: bytes) -> None:
        self._num_events += 1
        self._events.append(event)


def _encode_event(event: Event) -> bytes:
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return sse.named_event(name, event)


def _around(delta: Delta) -> tuple[bytes, bytes]:
    """What surrounds the text of a delta, up to the number."""
    event = msgspec.structs.replace(delta, delta=_MARK)
    before, after = _encode_event(event).split(_encode(_MARK))
    return before, after.removesuffix(_NUMBER)
