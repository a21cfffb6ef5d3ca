"""The side channel of a ring: ZeroMQ for the rare messages that are larger than a chunk.

One pair of DEALER sockets per ring and reader, over ipc. The engine core binds, the worker connects
and says hello; once the hello has arrived (`confirm`) the socket's file is no longer needed, and
the executor removes it. A message carries its sequence in the ring, where it is also announced:
order, room and waiting are the ring's, so no more messages are ever under way here than the ring
has chunks.
"""

import struct
import time
from collections.abc import Sequence

import zmq

from engine.codec import Buffer
from engine.errors import WireError
from engine.sockets import MAX_MESSAGE_BYTES, make_socket

_SEQUENCE = struct.Struct("<Q")
_HELLO = b"hello"
_ARRIVAL_S = 30.0
"""An announced message has left its sender already; with a gigabyte it may take a while."""


class SideChannel:
    """One end. For one thread at a time.

    Args:
        socket: a DEALER that is bound or connected to the other end.
        sentinel: becomes readable when the process at the other end has ended.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", sentinel: int | None = None) -> None:
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if sentinel is not None:
            self._poller.register(sentinel, zmq.POLLIN)

    @classmethod
    def bind(
        cls, context: "zmq.Context[zmq.Socket[bytes]]", address: str, sentinel: int | None = None
    ) -> "SideChannel":
        socket = make_socket(context, zmq.DEALER)
        socket.bind(address)
        return cls(socket, sentinel)

    @classmethod
    def connect(
        cls, context: "zmq.Context[zmq.Socket[bytes]]", address: str, sentinel: int | None = None
    ) -> "SideChannel":
        socket = make_socket(context, zmq.DEALER)
        socket.connect(address)
        socket.send(_HELLO)
        return cls(socket, sentinel)

    def confirm(self, timeout_s: float) -> bool:
        """Wait for the hello of the end that connects; return whether it has come."""
        if not self._socket.poll(round(timeout_s * 1000)):
            return False
        if (hello := self._socket.recv()) != _HELLO:
            raise WireError(f"a side channel began with {hello[:20]!r}")
        return True

    @staticmethod
    def send_to_all(
        channels: Sequence["SideChannel"], sequence: int, frames: Sequence[Buffer]
    ) -> None:
        """Send one message through several channels. The frames are copied once, whatever their
        number.

        Raises:
            BrokenPipeError: a reader has ended.
            WireError: the message is larger than any wire of ours takes.
        """
        num_bytes = sum(map(len, frames))
        if not channels or num_bytes > MAX_MESSAGE_BYTES:
            limit = MAX_MESSAGE_BYTES if channels else "what fits a chunk"
            raise WireError(f"a message of {num_bytes} bytes is over the limit: {limit}")
        copies = [zmq.Frame(frame, copy=True) for frame in (_SEQUENCE.pack(sequence), *frames)]
        for channel in channels:
            try:
                # Queues are unbounded, so only an end that binds and has lost its peer would wait.
                channel._socket.send_multipart(copies, zmq.NOBLOCK, copy=False)
            except zmq.Again as error:
                raise BrokenPipeError("a side channel has lost its reader") from error

    def receive(self, sequence: int) -> list[Buffer]:
        """Return the frames of the message that the ring has announced, as views of what came.

        Raises:
            EOFError: the sender has ended before it arrived.
            WireError: it is another message, or none: one that was announced cannot be left out.
        """
        if not self._await_message():
            raise WireError(f"message {sequence} was announced and has not come")
        head, *frames = self._socket.recv_multipart(copy=False)
        if head.bytes != _SEQUENCE.pack(sequence):
            raise WireError(f"not message {sequence} came through the side channel")
        return [frame.buffer for frame in frames]

    def _await_message(self) -> bool:
        deadline = time.monotonic() + _ARRIVAL_S
        while (patience_s := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(round(patience_s * 1000)))
            if self._socket in ready:
                return True
            if ready:
                raise EOFError("the sender has ended in the middle of a message")
        return False

    def close(self) -> None:
        self._socket.close()
