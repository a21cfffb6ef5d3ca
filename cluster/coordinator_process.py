"""ENTRY of the DP coordinator: the sockets and the clock around `coordinator`, which decides.

    engine cores  --DEALER--> ROUTER     READY in, START_DP_WAVE out
    engine cores  --PUSH----> PULL       load, waves, last words
    API servers   --PUSH----> PULL       FIRST_REQUEST
    API servers   <--SUB----- XPUB       LOADS

To an engine core it is one more API server. `main` is the child process where all ranks are on one
node; under Ray an actor runs a `CoordinatorServer`. Between messages it sleeps; a report a second
and the ranks' heartbeats are all that wakes it when there is nothing to do.
"""

import contextlib
import logging
import math
import socket as net
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import zmq

from cluster.coordinator import Coordinator, Start
from engine import lifecycle, log, run_log
from engine.bound import CoordinatorWires
from engine.codec import Decoder, Encoder
from engine.config import CoordinatorAddresses
from engine.doorkeeper import Doorkeeper
from engine.errors import EXIT_FAILED, WireError
from engine.sockets import make_socket, read_burst
from engine.thinning import ThinnedCount
from engine.wire import (
    CoordinatorType,
    EngineCoreOutputs,
    EngineDead,
    EngineReady,
    FirstRequest,
    Heartbeat,
    OutputType,
    RequestType,
    pack_identity,
    unpack_identity,
)

logger = logging.getLogger(__name__)

REPORTS_KEPT = 10
"""For an API server that does not read. A report is the whole state, so lost ones do no harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    wires: CoordinatorWires
    num_engines: int
    first_rank: int = 0
    """Data-parallel rank of the first."""
    log_level: str = "INFO"
    is_successor: bool = False
    """Of one that is gone; see `coordinator`."""
    run_folder: str | None = None


def main(config: CoordinatorConfig) -> NoReturn:
    """Run the coordinator until it is stopped or fails. The target of `multiprocessing`. Ends by
    the signal that stopped it, as an engine core does."""
    name = "DPCoordinator"
    lifecycle.set_title(name)
    log.configure(name, config.log_level)
    run_log.keep(config.run_folder, name)
    lifecycle.die_with_parent(at_once=False)
    lifecycle.leave_stopping_to_parent()
    server = CoordinatorServer(
        config.wires, config.num_engines, config.first_rank, is_successor=config.is_successor
    )
    try:
        with lifecycle.interrupted_by(lifecycle.STOP_SIGNAL, server.stop):
            server.bind()
            lifecycle.freeze_heap()
            server.run()
    except Exception as error:
        logger.exception("first cause: the coordinator has failed: %s", error)
        sys.exit(EXIT_FAILED)
    lifecycle.die_of(lifecycle.STOP_SIGNAL)


class CoordinatorServer:
    """The coordinator of one server. `bind`, then `run` in any one thread, until `stop`.

    Args:
        wires: where it is reached; bound by whoever made them.
        num_engines: engine cores of this server.
        first_rank: data-parallel rank of the first.
        is_successor: of one that is gone.
    """

    def __init__(
        self,
        wires: CoordinatorWires,
        num_engines: int,
        first_rank: int = 0,
        *,
        is_successor: bool = False,
    ) -> None:
        self.coordinator = Coordinator(num_engines, is_successor=is_successor)
        self.bad_messages = ThinnedCount()
        """Messages that broke the protocol, dropped."""
        self._wires = wires
        self._first_rank = first_rank
        self._doorkeeper = Doorkeeper()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._poller = zmq.Poller()
        self._is_stopped = False
        self._wake_writer: net.socket | None = None
        self._encoder = Encoder()
        self._decode_ready = Decoder[EngineReady](EngineReady).decode
        self._decode_outputs = Decoder[EngineCoreOutputs](EngineCoreOutputs).decode
        self._decode_heartbeat = Decoder[Heartbeat](Heartbeat).decode
        self._decode_dead = Decoder[EngineDead](EngineDead).decode
        self._decode_first = Decoder[FirstRequest](FirstRequest).decode

    def bind(self) -> CoordinatorAddresses:
        """Accept connections from now on; over TCP, from those only whose keys were allowed."""
        self._context = zmq.Context(io_threads=1)
        self._router = make_socket(self._context, zmq.ROUTER)
        self._pull = make_socket(self._context, zmq.PULL)
        self._xpub = make_socket(self._context, zmq.XPUB)
        self._xpub.setsockopt(zmq.SNDHWM, REPORTS_KEPT)
        # Every subscription is shown to us, not only the first of its kind.
        self._xpub.setsockopt(zmq.XPUB_VERBOSE, 1)
        sockets = (self._router, self._pull, self._xpub)
        if self._wires.keys is not None:
            self._doorkeeper.guard(self._context, sockets, self._wires.keys)
        self._wires.request.serve(self._router)
        self._wires.output.serve(self._pull)
        self._wires.publish.serve(self._xpub)
        self._wake_reader, self._wake_writer = net.socketpair()
        self._wake_writer.setblocking(False)
        for socket in (*sockets, self._wake_reader):
            self._poller.register(socket, zmq.POLLIN)
        return self._wires.addresses

    def allow(self, public_keys: Iterable[bytes]) -> None:
        """Admit engine cores and API servers with these keys. From any thread."""
        self._doorkeeper.allow(public_keys)

    def run(self) -> None:
        """Serve until `stop` is called, then close the sockets."""
        try:
            while not self._is_stopped:
                self._publish_if_due()
                for socket, _ in self._poller.poll(self._patience_ms()):
                    self._read(socket)
        finally:
            self._close()

    def stop(self) -> None:
        """End `run`. From any thread, or a signal handler; also before it has begun."""
        self._is_stopped = True
        if self._wake_writer is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._wake_writer.send(b"!")

    def _close(self) -> None:
        assert self._context is not None
        assert self._wake_writer is not None
        for socket in (self._router, self._pull, self._xpub):
            socket.close(linger=0)
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def _patience_ms(self) -> int:
        """How long there is nothing to do unless something comes."""
        return math.ceil(max(0.0, self.coordinator.report_due_at - time.monotonic()) * 1000)

    # ------------------------------------------------------------------------------- incoming

    def _read(self, socket: "zmq.Socket[bytes] | int") -> None:
        if isinstance(socket, int):  # `stop` has been called
            return
        # What is left keeps the poller awake.
        read_burst(socket, self._taker(socket), self.bad_messages)

    def _taker(self, socket: "zmq.Socket[bytes]") -> Callable[[list[bytes]], None]:
        if socket is self._router:
            return self._take_ready
        return self._take_output if socket is self._pull else self._take_subscription

    def _take_ready(self, frames: list[bytes]) -> None:
        identity, *body = frames
        index, epoch = unpack_identity(identity)
        ready = self._decode_ready(body)
        if (ready.engine_index, ready.epoch) != (index, epoch):
            raise WireError(f"READY of engine {ready.engine_index} came from engine {index}")
        self._send(self.coordinator.take_ready(index, epoch))

    def _take_output(self, frames: list[bytes]) -> None:
        kind, *body = frames
        match kind:
            case OutputType.OUTPUTS.value:
                self._send(self.coordinator.take_outputs(self._decode_outputs(body)))
            case OutputType.HEARTBEAT.value:
                # API servers hear them too, and judge.
                self._send(self.coordinator.take_heartbeat(self._decode_heartbeat(body)))
            case OutputType.DEAD.value:
                self.coordinator.take_dead(self._decode_dead(body))
            case CoordinatorType.FIRST_REQUEST.value:
                self._send(self.coordinator.take_first_request(self._decode_first(body)))
            case _:
                raise WireError(f"unknown message type {kind[:8]!r}")

    def _take_subscription(self, frames: list[bytes]) -> None:
        if frames[0][:1] == b"\x01":
            self.coordinator.hasten_report()

    # ------------------------------------------------------------------------------- outgoing

    def _send(self, starts: Iterable[Start]) -> None:
        for engine_index, epoch, message in starts:
            frames = [pack_identity(engine_index, epoch), RequestType.START_DP_WAVE.value]
            try:
                self._router.send_multipart([*frames, *self._encoder.encode(message)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                # It is down, and whoever watches it knows. It joins the wave when it is back.
                rank = self._first_rank + engine_index
                logger.warning("cannot reach engine core DP%d", rank)

    def _publish_if_due(self) -> None:
        report = self.coordinator.take_report(time.monotonic())
        if report is not None:
            body = self._encoder.encode(report)
            self._xpub.send_multipart([CoordinatorType.LOADS.value, *body])
