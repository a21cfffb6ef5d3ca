"""A real coordinator process, and the sockets of engine cores and API servers to talk to it."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from cluster import coordinator_process
from cluster.coordinator_process import CoordinatorConfig
from engine import codec
from engine.bound import BoundSocket, CoordinatorWires
from engine.config import CoordinatorAddresses
from engine.curve import CurveKeys, CurveLink
from engine.sockets import connect_socket
from engine.wire import (
    CoordinatorType,
    EngineCoreOutputs,
    EngineDead,
    EngineReady,
    Fingerprint,
    FirstRequest,
    LoadReport,
    OutputType,
    RequestType,
    SchedulerStats,
    StartWave,
    pack_identity,
)
from tests.helpers.api_peer import socket_folder
from tests.helpers.core_process import empty_main_module

TIMEOUT_MS = 20_000


def ipc_wires(folder: Path) -> CoordinatorWires:
    return CoordinatorWires(
        request=BoundSocket(f"ipc://{folder}/request"),
        output=BoundSocket(f"ipc://{folder}/output"),
        publish=BoundSocket(f"ipc://{folder}/publish"),
    )


class Peers:
    """Ranks and API servers as the coordinator sees them. A context manager."""

    def __init__(self, addresses: CoordinatorAddresses, keys: CurveKeys | None = None) -> None:
        self._addresses = addresses
        self._link = None
        if keys is not None and addresses.public_key is not None:
            self._link = CurveLink(keys, addresses.public_key)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = codec.Encoder()
        self._push = self._connect(zmq.PUSH, addresses.output)
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._sub = self._connect(zmq.SUB, addresses.publish)
        self._sub.subscribe(CoordinatorType.LOADS.value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def _connect(
        self, kind: int, address: str, identity: bytes | None = None
    ) -> "zmq.Socket[bytes]":
        return connect_socket(self._context, kind, address, identity=identity, curve=self._link)

    def ready(self, index: int, epoch: int = 0) -> None:
        """Rank `index` connects and says READY."""
        dealer = self._connect(zmq.DEALER, self._addresses.request, pack_identity(index, epoch))
        self._dealers[index] = dealer
        fingerprint = Fingerprint(1, "c", {}, "m", "t")
        message = EngineReady(index, epoch, 4096, 64, 16, 1024, "float32", 1000, 256, fingerprint)
        dealer.send_multipart(self._encoder.encode(message))

    def load(self, index: int, num_running: int, **fields: Any) -> None:
        stats = SchedulerStats(0, num_running, 0.5, num_by_client=[num_running])
        outputs = EngineCoreOutputs(index, 0, stats=stats, **fields)
        self.send(OutputType.OUTPUTS.value, outputs)

    def dead(self, index: int) -> None:
        self.send(OutputType.DEAD.value, EngineDead("ENGINE_CORE_DEAD", index, 0, "cause"))

    def first_request(self, index: int, wave: int) -> None:
        self.send(CoordinatorType.FIRST_REQUEST.value, FirstRequest(index, wave))

    def send(self, kind: bytes, message: object) -> None:
        self._push.send_multipart([kind, *self._encoder.encode(message)])

    def send_raw(self, *frames: bytes) -> None:
        self._push.send_multipart(frames)

    def started(self, index: int) -> StartWave:
        """The next START_DP_WAVE that comes to a rank."""
        dealer = self._dealers[index]
        assert dealer.poll(TIMEOUT_MS), f"rank {index} is not woken"
        kind, *body = dealer.recv_multipart()
        assert kind == RequestType.START_DP_WAVE.value
        return codec.Decoder[StartWave](StartWave).decode(body)

    def hears_reports(self, timeout_s: float) -> bool:
        return bool(self._sub.poll(int(timeout_s * 1000)))

    def report(self) -> LoadReport:
        """The next report."""
        assert self._sub.poll(TIMEOUT_MS), "no report comes"
        _, *body = self._sub.recv_multipart()
        return codec.Decoder[LoadReport](LoadReport).decode(body)

    def wait_for(self, accept: Callable[[LoadReport], bool]) -> LoadReport:
        """The next report that `accept` likes."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while time.monotonic() < deadline:
            if accept(report := self.report()):
                return report
        raise AssertionError(f"not reported; last came {report}")

    def wait_for_running(self, *num_running: int) -> LoadReport:
        """The next report with so many requests running on the ranks that are there."""
        return self.wait_for(lambda r: [load.num_running for load in r.loads] == [*num_running])


@dataclass
class CoordinatorUnderTest:
    process: BaseProcess
    peers: Peers = field(repr=False)
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def exit_code(self) -> int | None:
        """Wait until the process has ended."""
        self.process.join(TIMEOUT_MS / 1000)
        return self.process.exitcode


def start_process(wires: CoordinatorWires, num_engines: int) -> BaseProcess:
    config = CoordinatorConfig(wires=wires, num_engines=num_engines)
    started = multiprocessing.get_context("spawn").Process(
        target=coordinator_process.main, args=(config,)
    )
    with empty_main_module():
        started.start()
    return started


@contextlib.contextmanager
def run_coordinator(
    num_engines: int = 2, folder: Path | None = None
) -> Iterator[CoordinatorUnderTest]:
    """Start a coordinator on ipc, in a folder of its own unless one is given, and end it for
    sure."""
    with socket_folder() as fresh:
        wires = ipc_wires(folder or fresh)
        started = start_process(wires, num_engines)
        try:
            with Peers(wires.addresses) as peers:
                yield CoordinatorUnderTest(started, peers, folder or fresh)
        finally:
            started.kill()
            started.join()
            started.close()
