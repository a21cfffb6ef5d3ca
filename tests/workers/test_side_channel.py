"""The side channel by itself: two ends in one process."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine import sockets
from engine.errors import WireError
from workers import side_channel
from workers.side_channel import SideChannel


@contextlib.contextmanager
def open_channel(folder: Path, sentinel: int | None = None) -> Iterator[tuple[SideChannel, ...]]:
    """(the end that binds, the end that connects)."""
    address = f"ipc://{folder / 's'}"
    with zmq.Context() as context:
        with contextlib.closing(SideChannel.bind(context, address, sentinel)) as bound:
            with contextlib.closing(SideChannel.connect(context, address, sentinel)) as connected:
                yield bound, connected


def test_hello_says_that_the_other_end_is_there(tmp_path: Path) -> None:
    """After it the socket's file is not needed any more: messages still arrive."""
    with open_channel(tmp_path) as (bound, connected):
        assert bound.confirm(10)
        os.unlink(tmp_path / "s")
        SideChannel.send_to_all([bound], 7, [b"body", memoryview(b"array")])
        assert [bytes(frame) for frame in connected.receive(7)] == [b"body", b"array"]
        SideChannel.send_to_all([connected], 8, [b"back"])
        assert [bytes(frame) for frame in bound.receive(8)] == [b"back"]


def test_without_the_other_end_there_is_no_hello(tmp_path: Path) -> None:
    """Waiting for it has an end."""
    with zmq.Context() as context:
        with contextlib.closing(SideChannel.bind(context, f"ipc://{tmp_path / 's'}")) as bound:
            assert not bound.confirm(0.01)


def test_another_message_than_announced_breaks_the_protocol(tmp_path: Path) -> None:
    """The sequence in the ring and the one in the message are the same."""
    with open_channel(tmp_path) as (bound, connected):
        assert bound.confirm(10)
        SideChannel.send_to_all([bound], 3, [b"body"])
        with pytest.raises(WireError):
            connected.receive(4)


def test_dead_sender_ends_the_wait(tmp_path: Path) -> None:
    """A message that was announced and never comes, because its sender was killed."""
    sentinel, write_end = os.pipe()
    os.close(write_end)  # readable at once, as when the process has ended
    with open_channel(tmp_path, sentinel) as (_, connected):
        with pytest.raises(EOFError):
            connected.receive(0)
    os.close(sentinel)


def test_message_that_never_comes_breaks_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a sender that lives. It is no TimeoutError, which a reader takes for idleness."""
    monkeypatch.setattr(side_channel, "_ARRIVAL_S", 0.05)
    with open_channel(tmp_path) as (_, connected):
        with pytest.raises(WireError, match="message 5"):
            connected.receive(5)


@pytest.mark.timeout(20)
def test_a_reader_that_is_gone_does_not_hold_up_the_sender(tmp_path: Path) -> None:
    """The end that binds has nobody to queue for any more: it says so instead of waiting."""
    with open_channel(tmp_path) as (bound, connected):
        assert bound.confirm(10)
        connected.close()
        sending = (SideChannel.send_to_all([bound], n, [b"body"]) for n in itertools.count())
        with pytest.raises(BrokenPipeError):
            list(sending)  # until ZeroMQ has seen the end


def test_messages_over_the_limit_are_refused_before_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ would cut the connection instead of saying so."""
    monkeypatch.setattr(side_channel, "MAX_MESSAGE_BYTES", 100)
    assert sockets.MAX_MESSAGE_BYTES == 1 << 30
    with open_channel(tmp_path) as (bound, _):
        with pytest.raises(WireError, match="101 bytes"):
            SideChannel.send_to_all([bound], 0, [bytes(101)])
