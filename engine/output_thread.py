"""Output thread of an engine core: encodes what the main thread hands it, sends it, and keeps the
heart beating.

    main thread, input thread  --outbox-->  output thread  --PUSH-->  each API server

Bodies are encoded into one buffer that is used again and again; ZeroMQ copies them while sending
(they are small), and sends large arrays from where they lie. The thread knows nothing of requests.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec
import zmq

from engine import codec
from engine.curve import CurveLink
from engine.errors import WireError
from engine.sockets import connect_socket
from engine.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDead,
    FinishReason,
    Heartbeat,
    OutputDetails,
    OutputType,
    Phase,
    UtilityOutput,
)

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 5.0
"""How long the thread may take to send what is queued when the process ends."""


class Progress(NamedTuple):
    """How far the main thread is; read from the output thread, for heartbeats."""

    phase: Phase
    phase_began: float
    """On `time.monotonic`."""
    num_steps: int


class OutputThread:
    """Sends the outputs of one engine core to its API servers, in the order they were put.

    Args:
        addresses: one PULL per API server; a client index is a position in it.
        links: keys for the connection to each, where the wires are encrypted.
        progress: says what the main thread is doing. Must not block.
        on_crash: told of an error that ended the thread; called from the thread.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        addresses: Sequence[str],
        *,
        engine_index: int,
        epoch: int,
        heartbeat_interval_s: float,
        progress: Callable[[], Progress],
        on_crash: Callable[[BaseException], None],
        links: Sequence[CurveLink] = (),
    ) -> None:
        self._context = context
        self._addresses = addresses
        self._links = links
        self._engine_index = engine_index
        self._epoch = epoch
        self._heartbeat_interval_s = heartbeat_interval_s
        self._progress = progress
        self._on_crash = on_crash
        self._outbox: queue.SimpleQueue[tuple[int, EngineCoreOutputs] | EngineDead] = (
            queue.SimpleQueue()
        )
        self._encoder = codec.Encoder()
        self._buffer = bytearray()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._has_crashed = False
        self._linger_ms = 0
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Send `outputs` to one API server. From any thread; never blocks."""
        self._outbox.put((client_index, outputs))

    def finish(self, cause: str, linger_ms: int, *, is_told: bool = True) -> bool:
        """Send DEAD after everything that was put, as the last message to every API server.

        ZeroMQ goes on delivering for `linger_ms` at most. Returns whether the thread has ended, so
        that its context can be ended too.
        """
        self._linger_ms = linger_ms
        dead = EngineDead("ENGINE_CORE_DEAD", self._engine_index, self._epoch, cause, is_told)
        self._outbox.put(dead)
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            return False
        if self._has_crashed:  # its sockets are ours now
            self._send_to_all(OutputType.DEAD, dead)
            self._close()
        return True

    def _run(self) -> None:
        try:
            self._connect()
            self._send_until_dead()
            self._close()
        except BaseException as error:  # noqa: BLE001 - top of a thread
            self._has_crashed = True
            self._on_crash(error)

    def _connect(self) -> None:
        for address, link in zip_longest(self._addresses, self._links):
            self._sockets.append(connect_socket(self._context, zmq.PUSH, address, curve=link))

    def _send_until_dead(self) -> None:
        next_beat = time.monotonic()
        while True:
            patience_s = next_beat - time.monotonic()
            if patience_s <= 0:
                self._send_to_all(OutputType.HEARTBEAT, self._heartbeat())
                next_beat = time.monotonic() + self._heartbeat_interval_s
                continue
            try:
                item = self._outbox.get(timeout=patience_s)
            except queue.Empty:
                continue
            if isinstance(item, EngineDead):
                self._send_to_all(OutputType.DEAD, item)
                return
            client_index, outputs = item
            self._send_outputs(self._sockets[client_index], outputs)

    def _heartbeat(self) -> Heartbeat:
        phase, phase_began, num_steps = self._progress()
        age_s = 0.0 if phase is Phase.IDLE else time.monotonic() - phase_began
        return Heartbeat(
            self._engine_index, self._epoch, num_steps, max(0, int(age_s * 1000)), phase
        )

    def _send_to_all(self, kind: OutputType, message: object) -> None:
        for socket in self._sockets:
            self._send(socket, kind, message)

    def _send_outputs(self, socket: "zmq.Socket[bytes]", outputs: EngineCoreOutputs) -> None:
        try:
            self._send(socket, OutputType.OUTPUTS, outputs)
        except WireError as error:  # too large, and none of it has been sent
            for part in smaller(outputs, error):
                self._send_outputs(socket, part)

    def _send(self, socket: "zmq.Socket[bytes]", kind: OutputType, message: object) -> None:
        body, *arrays = self._encoder.encode_into(message, self._buffer)
        socket.send(kind.value, zmq.SNDMORE)
        # Copied, so the buffer is free again when `send` returns.
        socket.send(body, zmq.SNDMORE if arrays else 0)
        for index, array in enumerate(arrays, start=1):
            socket.send(array, zmq.SNDMORE if index < len(arrays) else 0, copy=False)

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close(self._linger_ms)


def smaller(outputs: EngineCoreOutputs, reason: WireError) -> list[EngineCoreOutputs]:
    """The same in messages that are smaller, in order. What is too large by itself becomes an
    error, of that request or call alone."""
    if len(outputs.outputs) > 1:
        half = len(outputs.outputs) // 2
        first, rest = outputs.outputs[:half], outputs.outputs[half:]
        begin = EngineCoreOutputs(
            outputs.engine_index, outputs.epoch, first, timestamp=outputs.timestamp
        )
        return [begin, msgspec.structs.replace(outputs, outputs=rest)]
    failure = f"what it has to say is too large: {reason}"
    if outputs.utility is not None and outputs.utility.failure is None:
        failed = UtilityOutput(outputs.utility.call_id, failure=failure)
        return [msgspec.structs.replace(outputs, utility=failed)]
    if outputs.outputs and outputs.outputs[0].finish_reason is not FinishReason.ERROR:
        logger.warning("request_id=%s: %s", outputs.outputs[0].request_id, failure)
        ended = EngineCoreOutput(
            outputs.outputs[0].request_id,
            b"",
            FinishReason.ERROR,
            details=OutputDetails(error=failure),
        )
        return [msgspec.structs.replace(outputs, outputs=[ended])]
    raise reason
