"""One worker process as its engine core sees it: start, wires, name, end. Used by `executor`."""

import contextlib
import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq

from engine.config import EngineConfig
from workers import process
from workers.process import MakeWorker, WorkerStart
from workers.ring import Peer, Ring, RingReader
from workers.shared_memory import NamelessFile
from workers.side_channel import SideChannel
from workers.wakeup import Bell

RESPONSE_CHUNKS = 4
"""Replies that a worker gets ahead of its engine core."""


class WorkerHandle:
    """Starts the process at once; the executor ends it.

    Args:
        config: settings of the engine core.
        rank: the worker's rank.
        calls: the broadcast ring.
        chunk_bytes: chunk size of the response ring.
        folder: private folder for the socket files of the side channels.
        rendezvous: where the ranks find each other.
        make_worker: makes the worker in its process.
        resources: what is opened here is closed with it.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        *,
        calls: Ring,
        chunk_bytes: int,
        folder: Path,
        rendezvous: NamelessFile,
        make_worker: MakeWorker,
        resources: contextlib.ExitStack,
    ) -> None:
        self._resources = resources
        self._responses = resources.enter_context(
            contextlib.closing(
                Ring.create(num_chunks=RESPONSE_CHUNKS, chunk_bytes=chunk_bytes, num_readers=1)
            )
        )
        self._start = WorkerStart(
            config=config,
            rank=rank,
            calls=calls,
            replies=self._responses,
            calls_address=f"ipc://{folder / f'calls-{rank}'}",
            replies_address=f"ipc://{folder / f'replies-{rank}'}",
            rendezvous=rendezvous,
            make_worker=make_worker,
        )
        name = process.rank_name(config.parallel, rank)
        context = multiprocessing.get_context(config.executor.start_method)
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined] # typeshed
            target=process.main, args=(self._start,), name=f"Worker_{name}", daemon=True
        )
        self.process.start()
        self.peer = Peer(f"worker {name} pid={self.process.pid}", self.process.sentinel)

    @property
    def name(self) -> str:
        """`worker DP0_PP0_TP1 pid=4711`."""
        return self.peer.name

    @property
    def bell(self) -> Bell:
        """Rings when there is a reply."""
        return self._responses.reader_bells[0]

    def open_wires(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Open our ends of what the process was started with."""
        self.calls_channel, replies_channel = (
            self._resources.enter_context(
                contextlib.closing(SideChannel.bind(context, address, self.peer.sentinel))
            )
            for address in (self._start.calls_address, self._start.replies_address)
        )
        self.replies = RingReader(self._responses, 0, self.peer, replies_channel)
        self._unconfirmed = [self.calls_channel, replies_channel]

    def is_connected(self, timeout_s: float) -> bool:
        """Wait for the worker's other ends; once they are there, the socket files may go."""
        while self._unconfirmed and self._unconfirmed[0].confirm(timeout_s):
            del self._unconfirmed[0]
        return not self._unconfirmed
