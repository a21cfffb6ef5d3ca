"""Wire 1 on the API server's side as messages: which struct is in which frames, and back.

`wire_sockets` moves the frames and knows nothing of them. Used by `engine_client`, which knows what
follows from a message.
"""

from collections.abc import Callable

from api.wire_sockets import WireSockets
from engine.codec import Decoder, Encoder
from engine.errors import InvalidRequestError, WireError
from engine.wire import (
    MAX_REQUEST_BYTES,
    EngineCoreOutputs,
    EngineDead,
    EngineReady,
    Heartbeat,
    OutputType,
    RequestType,
)


class EngineWire:
    """Both directions of wire 1. Whoever takes in a message may raise WireError: it is counted and
    dropped.

    Args:
        take_ready: takes in a READY; the sender's identity first.
        take_outputs: takes in what one step brought.
        take_heartbeat: takes in where an engine core is.
        take_dead: takes in last words.
    """

    def __init__(
        self,
        *,
        take_ready: Callable[[bytes, EngineReady], None],
        take_outputs: Callable[[EngineCoreOutputs], None],
        take_heartbeat: Callable[[Heartbeat], None],
        take_dead: Callable[[EngineDead], None],
    ) -> None:
        self.sockets = WireSockets(self._on_ready, self._on_output)
        self._take_ready = take_ready
        self._take_outputs = take_outputs
        self._take_heartbeat = take_heartbeat
        self._take_dead = take_dead
        self._encoder = Encoder(MAX_REQUEST_BYTES)
        self._decode_ready = Decoder[EngineReady](EngineReady).decode
        self._decode_outputs = Decoder[EngineCoreOutputs](EngineCoreOutputs).decode
        self._decode_heartbeat = Decoder[Heartbeat](Heartbeat).decode
        self._decode_dead = Decoder[EngineDead](EngineDead).decode

    def send(self, identity: bytes, kind: RequestType, message: object) -> bool:
        """Send one message. Large arrays are not copied: they must stay as they are until sent.
        Returns False if the receiver is not connected.

        Raises:
            InvalidRequestError: it is too large for a wire.
        """
        try:
            frames = self._encoder.encode(message)
        except WireError as error:
            raise InvalidRequestError(f"the request is too large for an engine: {error}") from error
        return self.sockets.send([identity, kind.value, *frames])

    def _on_ready(self, frames: list[bytes]) -> None:
        identity, *body = frames
        self._take_ready(identity, self._decode_ready(body))

    def _on_output(self, frames: list[bytes]) -> None:
        kind, *body = frames
        if kind == OutputType.OUTPUTS.value:
            self._take_outputs(self._decode_outputs(body))
        elif kind == OutputType.HEARTBEAT.value:
            self._take_heartbeat(self._decode_heartbeat(body))
        elif kind == OutputType.DEAD.value:
            self._take_dead(self._decode_dead(body))
        else:
            raise WireError(f"unknown output type {kind[:8]!r}")
