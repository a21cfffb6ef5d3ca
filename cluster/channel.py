"""What the command and its API server processes say to each other, when there are several.

A pair of connected sockets per API server, msgpack on it; bound sockets travel as descriptors. Here
starting and ending is told, and metrics when somebody scrapes them: requests and tokens go by
wire 1.
"""

import contextlib
import threading
from multiprocessing import reduction
from multiprocessing.connection import Connection

import msgspec

from api.metric_families import Family
from engine.bound import BoundSocket, ServerWires
from engine.config import CoordinatorAddresses
from engine.curve import CurveKeys
from engine.wire import EngineReady, Fingerprint


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that is said."""


class Wires(Message, frozen=True):
    """To an API server: serve these. The descriptors of bound TCP sockets follow, in this order."""

    request: str
    output: str
    keys: tuple[bytes, bytes] | None
    """Public and secret; None on ipc."""
    has_descriptors: bool


class Begin(Message, frozen=True):
    """To an API server: engine cores are starting; load the text side meanwhile."""

    model_folder: str
    coordinator: CoordinatorAddresses | None
    began_s: float
    """When the start's one deadline began to run, on this machine's monotonic clock."""
    expected: Fingerprint | None = None
    """What engine cores have to be like."""
    ready: list[EngineReady] | None = None
    """To one that comes later, in the place of another: these have said READY already."""
    epochs: dict[int, int] = {}
    """And of these, by index, lower epochs have been lost."""


class Allow(Message, frozen=True):
    """To an API server: these engine cores may connect."""

    public_keys: list[bytes]


class Death(Message, frozen=True):
    """Either way: something that the server cannot live without is gone."""

    engine_index: int | None
    """Among those of this server. None: an API server or the coordinator."""
    cause: str
    is_first: bool = False
    """From an API server: it is the first to see it, and has left the logging to the command."""


class Lost(Message, frozen=True):
    """Either way: an incarnation of an engine core is gone, and the server outlives it."""

    engine_index: int
    epoch: int
    cause: str
    is_first: bool = False
    """As in `Death`."""


class Up(Message, frozen=True):
    """From an API server: it has heard READY of another incarnation."""

    ready: EngineReady


class Drop(Message, frozen=True):
    """To an API server: tell the engine cores that another one is gone."""

    client_index: int
    arrived_before: float
    """Seconds since the epoch: what it has sent before is nobody's now."""


class Loaded(Message, frozen=True):
    """From an API server: it could take requests."""

    ready: list[EngineReady]


class Serve(Message, frozen=True):
    """To an API server: all have loaded; take requests."""


class Refusal(Message, frozen=True):
    """From an API server: the settings or the model cannot work, and it ends."""

    message: str


class Scrape(Message, frozen=True):
    """From an API server: somebody wants everybody's metrics."""

    number: int
    """Counts this API server's scrapes."""


class PartWanted(Message, frozen=True):
    """To an API server: tell your metrics."""


class Part(Message, frozen=True):
    """From an API server: its metrics as they are now. It has been asked, or it ends."""

    families: list[Family]


class Whole(Message, frozen=True):
    """To an API server: the metrics of all, merged."""

    number: int
    """Of its scrape."""
    families: list[Family]


class Ping(Message, frozen=True):
    """To an API server that serves: say that your event loop still turns."""


class Pong(Message, frozen=True):
    """From an API server: it does."""

    last_seen: list[str]
    """What each engine core was doing when it was last heard of; empty: it has not been."""


ToApiServer = Wires | Begin | Serve | Allow | Drop | Death | Lost | PartWanted | Whole | Ping
FromApiServer = Loaded | Refusal | Death | Lost | Up | Scrape | Part | Pong
AnyMessage = ToApiServer | FromApiServer

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyMessage).decode


class Channel:
    """One end. Sending is for any thread, receiving for one."""

    def __init__(self, connection: "Connection[bytes, bytes]") -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: AnyMessage) -> None:
        """Say it; nothing happens if nobody is there any more."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(_encode(message))

    def send_wires(self, wires: ServerWires) -> None:
        """Hand over bound sockets. Ours are to be closed after it."""
        keys = None if wires.keys is None else (wires.keys.public, wires.keys.secret)
        descriptors = [wires.request.descriptor, wires.output.descriptor]
        has_descriptors = None not in descriptors
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(
                _encode(Wires(wires.request.address, wires.output.address, keys, has_descriptors))
            )
            for descriptor in descriptors if has_descriptors else ():
                assert descriptor is not None
                reduction.send_handle(self._connection, descriptor, None)

    def receive(self) -> AnyMessage:
        """Wait for the next message.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            return _decode(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError(str(error)) from error

    def receive_wires(self, wires: Wires) -> ServerWires:
        """Take what `send_wires` has handed over, after its message."""

        def take(address: str) -> BoundSocket:
            if not wires.has_descriptors:
                return BoundSocket(address)
            return BoundSocket.from_descriptor(address, reduction.recv_handle(self._connection))

        return ServerWires(
            request=take(wires.request),
            output=take(wires.output),
            keys=None if wires.keys is None else CurveKeys(*wires.keys),
        )

    def close(self) -> None:
        self._connection.close()
