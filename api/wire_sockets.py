"""The API server's sockets of wire 1 on an event loop: bind, read until empty, send.

They are plain ZeroMQ sockets, read when the loop says that their descriptor has changed: a third to
a half of what `zmq.asyncio` costs per message (7 and 23 us in bursts, on uvloop). Used by
`engine_wire`, which knows what the frames mean.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

from engine.bound import ServerWires
from engine.curve import CurveKeys, CurveLink
from engine.doorkeeper import Doorkeeper
from engine.sockets import connect_socket, make_socket, read_burst
from engine.thinning import ThinnedCount

logger = logging.getLogger(__name__)

_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)

_COPY_BELOW_BYTES = 1 << 16
"""Copying a smaller frame costs less than keeping track of it until it is sent."""

TakeFrames = Callable[[list[bytes]], None]
"""Takes in one message; WireError says that it breaks the protocol."""


class WireSockets:
    """ROUTER and PULL of one API server, and a SUB where there is a coordinator. All methods belong
    to the loop's thread.

    Args:
        on_request_wire: takes in what comes on the ROUTER, the sender's identity first.
        on_output_wire: takes in what comes on the PULL.
    """

    def __init__(self, on_request_wire: TakeFrames, on_output_wire: TakeFrames) -> None:
        self.bad_messages = ThinnedCount()
        """Messages that broke the protocol, dropped."""
        self._on_request_wire = on_request_wire
        self._on_output_wire = on_output_wire
        self._keys: CurveKeys | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._readers: list[tuple[zmq.Socket[bytes], TakeFrames]] = []
        """In the order in which they are read."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_read_due = False

    @property
    def is_bound(self) -> bool:
        return self._context is not None

    def bind(self, wires: ServerWires, doorkeeper: Doorkeeper) -> None:
        """Make the ZeroMQ context and accept connections on `wires`; over TCP, from those only that
        `doorkeeper` knows."""
        self._context, self._keys = zmq.Context(io_threads=1), wires.keys
        self._router = make_socket(self._context, zmq.ROUTER)
        self._pull = make_socket(self._context, zmq.PULL)
        if wires.keys is not None:
            doorkeeper.guard(self._context, (self._router, self._pull), wires.keys)
        wires.request.serve(self._router)
        wires.output.serve(self._pull)
        self._readers = [(self._pull, self._on_output_wire), (self._router, self._on_request_wire)]

    def subscribe(
        self, address: str, topic: bytes, public_key: bytes | None, take: TakeFrames
    ) -> None:
        """Read what a publisher says, too. After `bind` and before `watch`.

        Args:
            address: where it has bound.
            topic: the first bytes of what is wanted.
            public_key: whom to expect there; None on ipc.
            take: takes in what comes.
        """
        assert self._context is not None
        link = None
        if public_key is not None:
            assert self._keys is not None, "an API server whose own wires are not encrypted"
            link = CurveLink(self._keys, public_key)
        socket = connect_socket(self._context, zmq.SUB, address, curve=link)
        socket.subscribe(topic)
        self._readers.append((socket, take))

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read from now on, whenever something comes."""
        self._loop = loop
        for socket, take in self._readers:
            loop.add_reader(_descriptor(socket), self._read, socket, take)
            # The descriptors signal changes only, and one may have been before we looked.
            loop.call_soon(self._read, socket, take)

    def read_all(self) -> None:
        """Take in what has come by now, outputs first."""
        for socket, take in self._readers:
            self._read(socket, take)

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Send one message; the first frame is the receiver's identity. Large frames are not
        copied: they must stay as they are until sent. Returns False if the receiver is not
        connected."""
        *first, last = frames
        try:
            for frame in first:
                self._router.send(frame, _NOBLOCK_MORE, len(frame) < _COPY_BELOW_BYTES)
            self._router.send(last, _NOBLOCK, len(last) < _COPY_BELOW_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        # Sending handles the socket's pending commands, after which its descriptor stays silent
        # about what came in meanwhile. It is read in the next turn: whoever sends is in the middle
        # of something, and what comes may be about that.
        if self._loop is not None and not self._is_read_due:
            self._is_read_due = True
            self._loop.call_soon(self._read_router)
        return True

    def _read_router(self) -> None:
        self._is_read_due = False
        self._read(self._router, self._on_request_wire)

    def close(self) -> None:
        """Idempotent."""
        loop, self._loop = self._loop, None
        if self._context is None:
            return
        for socket, _ in self._readers:
            if loop is not None:
                loop.remove_reader(_descriptor(socket))
            socket.close(linger=0)
        self._context.term()
        self._context = None

    def _read(self, socket: "zmq.Socket[bytes]", take: TakeFrames) -> None:
        """Read until nothing is left, because the descriptor signals changes only."""
        if self._loop is None:
            return
        if read_burst(socket, take, self.bad_messages) and self._loop is not None:
            self._loop.call_soon(self._read, socket, take)


def _descriptor(socket: "zmq.Socket[bytes]") -> int:
    """What the event loop watches. It signals changes, not states."""
    return int(socket.getsockopt(zmq.FD))
