"""Events on their way into one HTTP response."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from api import errors, sse
from engine.errors import RequestFailedError


class Chunk(msgspec.Struct):
    id: str
    index: int
    text: str
    end: str | None = None


class Source:
    """Gives the events one after the other; an error in their place is raised."""

    def __init__(self, events: Sequence[bytes | Exception]) -> None:
        self._events = list(events)

    @property
    def is_over(self) -> bool:
        return not self._events

    async def next(self) -> bytes:
        event = self._events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    def failed(self, failure: errors.Failure) -> bytes:
        return sse.failed(failure)


def sent(*events: bytes | Exception) -> list[Any]:
    """The messages of a response with these events, and "closed" where it is closed."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read while a stream is sent")

    stream = sse.EventStream(Source(events), lambda: messages.append("closed"), {"X-More": "1"})
    asyncio.run(stream({}, receive, send))
    return messages


@settings(max_examples=200)
@given(st.text(), st.text(max_size=20), st.integers(0, 3))
def test_an_event_with_another_text_is_as_if_it_were_encoded_anew(
    text: str, name: str, index: int
) -> None:
    """To the byte, whatever the text and what surrounds it."""
    events = sse.TextEvents(lambda index, text: Chunk(name, index, text))
    named = sse.TextEvents(lambda index, text: Chunk(name, index, text), "news")
    encodable = text.encode("utf-8", "replace").decode()

    for each in (encodable, "", '"', encodable):
        assert events.event(index, each) == sse.event(Chunk(name, index, each))
        assert named.event(index, each) == sse.named_event("news", Chunk(name, index, each))


def test_an_event_may_have_a_name() -> None:
    """In a line before its data."""
    assert sse.named_event("news", {"a": "\n"}) == b'event: news\ndata: {"a":"\\n"}\n\n'


def test_the_end_of_a_stream_leaves_with_its_last_events() -> None:
    """One message for each time that there is something, the last of them with the mark of the
    end: each is a system call and a packet."""
    head, first, last, closed = sent(b"data: 1\n\n", b"data: 2\n\n" + sse.DONE)

    assert head["type"] == "http.response.start"
    assert (b"x-more", b"1") in head["headers"]
    assert (first["body"], first["more_body"]) == (b"data: 1\n\n", True)
    assert last["body"] == b"data: 2\n\ndata: [DONE]\n\n"
    assert not last["more_body"]
    assert closed == "closed"


def test_an_error_ends_a_stream_without_done() -> None:
    """Its event is the last, and the stream is closed all the same."""
    _, _, last, closed = sent(b"data: 1\n\n", RequestFailedError("no luck"))

    assert b"no luck" in last["body"]
    assert sse.DONE not in last["body"]
    assert not last["more_body"]
    assert closed == "closed"
