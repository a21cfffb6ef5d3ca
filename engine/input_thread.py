"""Input thread of an engine core: receives from every API server, decodes with limits, prepares.

    each API server  --DEALER-->  input thread  --inbox-->  main thread
                                                --aborts->  main thread, right after a forward pass

It works while the forward pass runs, so that the main thread finds requests ready to schedule.
Whatever breaks the protocol is counted and dropped; a request that can still be named gets its
error at once. A request with a structured output waits until that is compiled, in a station beside
the inbox (`grammar.station`). The coordinator is one more API server here, but it says
START_DP_WAVE only, and where there is one nobody else may. The thread decides nothing: what a
request must look like is `EngineCore.prepare`'s.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

import msgspec
import zmq

from engine import codec
from engine.curve import CurveLink
from engine.errors import RaywireError, RequestError, RequestFailedError, WireError
from engine.grammar.compiler import Compiler
from engine.grammar.station import Station
from engine.inbox import Abort, AbortQueue, Add, Call, Fenced, Inbox, Wave
from engine.request import Request
from engine.sockets import BURST, MAX_MESSAGE_BYTES, connect_socket, has_message
from engine.thinning import ThinnedCount
from engine.wire import (
    FROM_SOCKET,
    MAX_REQUEST_BYTES,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    Fence,
    FinishReason,
    OutputDetails,
    RequestId,
    RequestIds,
    RequestType,
    StartWave,
    UtilityCall,
    pack_identity,
    sendable,
)

logger = logging.getLogger(__name__)

MAX_FRAMES = 1024
"""Frames of one message: type, body, and one per large array."""

COPY_BELOW_BYTES = 8192
"""Copying a smaller frame costs less than keeping ZeroMQ's, which may lie at any address."""

_NOBLOCK, _RCVMORE = int(zmq.NOBLOCK), int(zmq.RCVMORE)


class _Named(msgspec.Struct, array_like=True):
    """As much of a broken ADD as its error needs."""

    request_id: RequestId


class InputThread:
    """Feeds one engine core from its API servers.

    Args:
        addresses: one ROUTER per API server; a client index is a position in it.
        links: keys for the connection to each, where the wires are encrypted.
        coordinator_index: the coordinator's; None without one.
        ready: sent on each DEALER before anything else, since a ROUTER cannot address a stranger.
        prepare: `EngineCore.prepare`: raises RequestError for a request that cannot be served.
        dropped: counts what breaks the protocol.
        reply: sends outputs to an API server, past the main thread.
        on_crash: told of an error that ended the thread; called from the thread.
        compiler: of structured outputs.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        addresses: Sequence[str],
        *,
        coordinator_index: int | None = None,
        ready: EngineReady,
        prepare: Callable[[EngineCoreRequest], Request],
        dropped: ThinnedCount,
        inbox: Inbox,
        aborts: AbortQueue,
        reply: Callable[[int, EngineCoreOutputs], None],
        on_crash: Callable[[BaseException], None],
        compiler: Compiler,
        links: Sequence[CurveLink] = (),
    ) -> None:
        self._dropped = dropped
        self._context = context
        self._addresses = addresses
        self._links = links
        self._coordinator_index = coordinator_index
        self._ready = ready
        self._prepare = prepare
        self._inbox = inbox
        self._aborts = aborts
        self._reply = reply
        self._on_crash = on_crash
        self._station = Station(
            compiler,
            put=lambda request: self._inbox.put(Add(request)),
            refuse=lambda request, error: self._refuse(
                request.client_index, request.request_id, error
            ),
            end=lambda request: self._end(
                request.client_index, request.request_id, FinishReason.ABORT
            ),
        )
        most = MAX_REQUEST_BYTES
        self._decode_add = codec.Decoder[EngineCoreRequest](EngineCoreRequest, most).decode
        self._decode_abort = codec.Decoder[list[str]](RequestIds, most).decode
        self._decode_wave = codec.Decoder[StartWave](StartWave, most).decode
        self._decode_call = codec.Decoder[UtilityCall](UtilityCall, most).decode
        self._decode_fence = codec.Decoder[Fence](Fence, most).decode
        # Of any size: it makes nothing but the id.
        self._decode_named = codec.Decoder[_Named](_Named, MAX_MESSAGE_BYTES).decode
        self._thread = threading.Thread(target=self._run, name="input", daemon=True)

    def start(self) -> None:
        """Connect and say READY. Ends by itself when the ZeroMQ context is terminated."""
        self._thread.start()

    def close(self) -> None:
        """End what compiles. The thread ends with the ZeroMQ context."""
        self._station.close()

    def _run(self) -> None:
        sockets: list[zmq.Socket[bytes]] = []
        try:
            for address, link in zip_longest(self._addresses, self._links):
                sockets.append(self._connect(address, link))
                # The context may end at any moment, and waits until each socket is closed.
                sockets[-1].send_multipart(codec.Encoder().encode(self._ready))
            self._receive_for_ever(sockets)
        except zmq.ContextTerminated:
            pass
        except BaseException as error:  # noqa: BLE001 - top of a thread
            self._on_crash(error)
        finally:
            for socket in sockets:
                socket.close()

    def _connect(self, address: str, link: CurveLink | None) -> "zmq.Socket[bytes]":
        identity = pack_identity(self._ready.engine_index, self._ready.epoch)
        return connect_socket(self._context, zmq.DEALER, address, identity=identity, curve=link)

    def _receive_for_ever(self, sockets: list["zmq.Socket[bytes]"]) -> None:
        poller = zmq.Poller()
        clients = {}
        for client_index, socket in enumerate(sockets):
            poller.register(socket, zmq.POLLIN)
            clients[socket] = client_index
        while True:
            for socket, _ in poller.poll():
                self._receive_burst(clients[socket], socket)

    def _receive_burst(self, client_index: int, socket: "zmq.Socket[bytes]") -> None:
        for _ in range(BURST):
            if not has_message(socket):
                return
            try:
                self._take(client_index, _receive(socket))
            except WireError as error:
                if self._dropped.add():
                    count = self._dropped.count
                    logger.warning(
                        "dropped a message client=%d total=%d: %s", client_index, count, error
                    )

    def _take(self, client_index: int, frames: Sequence[codec.Buffer]) -> None:
        """Decode one message and pass it on. Raises WireError if it breaks the protocol."""
        if len(frames) > MAX_FRAMES:
            raise WireError(f"a message of more than {MAX_FRAMES} frames")
        type_byte, *body = frames
        kind = _kind(type_byte)
        self._check_sender(client_index, kind)
        match kind:
            case RequestType.ADD:
                self._take_request(client_index, body)
            case RequestType.ABORT:
                request_ids = self._decode_abort(body)
                self._station.abort(request_ids)
                # On both: the second reaches a request that runs after the step under way, the
                # first one that still waits in the inbox.
                self._inbox.put(Abort(request_ids))
                self._aborts.put(request_ids)
            case RequestType.UTILITY:
                call = self._decode_call(body)
                _check_client(client_index, call.client_index)
                self._inbox.put(Call(call))
            case RequestType.START_DP_WAVE:
                self._inbox.put(Wave(self._decode_wave(body)))
            case RequestType.FENCE:
                self._inbox.put(Fenced(self._decode_fence(body).epoch))

    def _check_sender(self, client_index: int, kind: RequestType) -> None:
        if self._coordinator_index is None:
            return
        is_for_coordinator = kind is RequestType.START_DP_WAVE
        if is_for_coordinator != (client_index == self._coordinator_index):
            raise WireError(f"{kind.name} came from client {client_index}, whose word it is not")

    def _take_request(self, client_index: int, body: list[codec.Buffer]) -> None:
        try:
            message = self._decode_add(body)
            _check_client(client_index, message.client_index)
        except WireError as error:
            self._refuse_undecodable(client_index, body, error)
            raise
        try:
            request = self._prepare(message)
        except RequestError as error:
            self._refuse(client_index, message.request_id, error)
        except Exception:
            # Preparing touches nothing that requests share, so the others go on.
            logger.exception("cannot prepare request_id=%s", message.request_id)
            failure = RequestFailedError("the request could not be prepared")
            self._refuse(client_index, message.request_id, failure)
        else:
            if request.sampling_params.structured_output is None:
                self._inbox.put(Add(request))
            else:
                self._station.submit(request)

    def _refuse_undecodable(
        self, client_index: int, body: list[codec.Buffer], error: WireError
    ) -> None:
        """Answer a broken ADD whose id can still be read: its client waits for an end."""
        try:
            named = self._decode_named(body[:1])
        except WireError:
            return
        self._refuse(client_index, named.request_id, error)

    def _refuse(self, client_index: int, request_id: str, error: RaywireError) -> None:
        details = OutputDetails(
            error=sendable(str(error))[:1000],
            error_code=(error.code or "") if isinstance(error, RequestError) else None,
            error_param=error.param if isinstance(error, RequestError) else None,
        )
        self._end(client_index, request_id, FinishReason.ERROR, details)

    def _end(
        self,
        client_index: int,
        request_id: str,
        reason: FinishReason,
        details: OutputDetails | None = None,
    ) -> None:
        """Answer for a request that the core does not know."""
        output = EngineCoreOutput(request_id, b"", reason, details=details)
        self._reply(
            client_index,
            EngineCoreOutputs(
                self._ready.engine_index,
                self._ready.epoch,
                outputs=[output],
                timestamp=time.monotonic(),
                finished_ids=[request_id],
            ),
        )


def _receive(socket: "zmq.Socket[bytes]") -> list[codec.Buffer]:
    """Receive one message that is there; large arrays stay where ZeroMQ has put them."""
    frames: list[codec.Buffer] = [socket.recv(_NOBLOCK)]
    if socket.getsockopt(_RCVMORE):
        frames.append(socket.recv(_NOBLOCK))  # the body, which is small
    while socket.getsockopt(_RCVMORE):
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer)
    return frames


def _kind(type_byte: codec.Buffer) -> RequestType:
    try:
        kind = RequestType(bytes(type_byte[:2]))
    except ValueError as error:
        raise WireError(f"unknown request type {bytes(type_byte[:8])!r}") from error
    if kind not in FROM_SOCKET:
        raise WireError(f"{kind.name} is for this process only; it came from a socket")
    return kind


def _check_client(came_from: int, says: int) -> None:
    if came_from != says:
        raise WireError(f"a message of client {came_from} that names client {says}")
