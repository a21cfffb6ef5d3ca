"""ENTRY, worker process: read a call, execute it, reply.

One process per rank, child of the engine core, which closes the broadcast ring to end it. Its first
failure is its last act: it reports that to the engine core, whoever was to reply, and exits, since
after half a step nobody can say what state its tensors are in. Imports no torch at the top, because
the engine core imports this module too, to name `main` as what its children run.
"""

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from engine import lifecycle, log, run_log
from engine.config import EngineConfig, ParallelConfig
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError
from workers import resources, rpc
from workers.ring import Peer, Ring, RingReader, RingWriter
from workers.shared_memory import NamelessFile
from workers.side_channel import SideChannel

logger = logging.getLogger(__name__)

_IDLE_S = 60.0
"""A worker without work looks up this often. A call, or the end of its engine core, wakes it."""

MakeWorker = Callable[[EngineConfig, int, str], rpc.Worker]
"""(settings, rank, path of the rendezvous file) to a worker that has not loaded yet."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """All that a worker is given at its start."""

    config: EngineConfig
    rank: int
    calls: Ring
    """One for all ranks; ours is the reader of our rank."""
    replies: Ring
    """Ours alone; we write."""
    calls_address: str
    replies_address: str
    """The rings' side channels, bound by the engine core."""
    rendezvous: NamelessFile
    """Where the ranks find each other (torch.distributed's file store)."""
    make_worker: MakeWorker


def make_worker(config: EngineConfig, rank: int, rendezvous: str) -> rpc.Worker:
    """Make the real worker."""
    # Here, not at the top: it brings torch, which only worker processes load, and only after
    # `prepare_environment` has set what it reads.
    from workers.worker import Worker

    return Worker(config, rank, rendezvous)


def rank_name(parallel: ParallelConfig, rank: int) -> str:
    """`DP0_PP0_TP1`, as in process titles."""
    pp_rank, tp_rank = divmod(rank, parallel.tensor_parallel_size)
    return f"DP{parallel.data_parallel_rank}_PP{pp_rank}_TP{tp_rank}"


def main(start: WorkerStart) -> None:
    """Run one worker until its engine core closes the ring. Entry of the worker process."""
    lifecycle.die_with_parent(at_once=True)
    lifecycle.leave_stopping_to_parent()
    name = f"Worker_{rank_name(start.config.parallel, start.rank)}"
    lifecycle.set_title(name)
    log.configure(name, start.config.log_level)
    run_log.keep(start.config.run_folder, name)
    resources.prepare_environment(start.config)
    with contextlib.closing(Wires(start)) as wires:
        exit_code = 0
        try:
            run(start, wires)
        except Exception as error:  # noqa: BLE001 - the top of the process
            wires.report(error)
            exit_code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    _exit_at_once(exit_code)


def run(start: WorkerStart, wires: "Wires") -> None:
    """Execute the engine core's calls until there will be no more."""
    worker = start.make_worker(start.config, start.rank, start.rendezvous.path)
    for number, call in wires.calls():
        reply = rpc.perform(worker, call, number)
        if call.output_rank in (None, start.rank) and rpc.is_answered(call):
            wires.reply(reply)
        if isinstance(call, rpc.Load | rpc.InitializeKVCache):
            lifecycle.freeze_heap()
    worker.close()


class Wires:
    """This worker's ends of the rings."""

    def __init__(self, start: WorkerStart) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        core = Peer(f"engine core pid={parent.pid}", parent.sentinel)
        self._timeout_s = start.config.executor.execute_timeout_s
        self._call_number = -1
        self._doing = "start"
        self._encoder = rpc.encoder()
        self._decoder = rpc.call_decoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._side_channels = [
            SideChannel.connect(self._context, address, parent.sentinel)
            for address in (start.calls_address, start.replies_address)
        ]
        self._calls = RingReader(start.calls, start.rank, core, self._side_channels[0])
        self._replies = RingWriter(start.replies, [core], self._side_channels[1:])

    def calls(self) -> Iterator[tuple[int, rpc.Call]]:
        """Yield number and call as they come, until the engine core closes the ring or is gone.

        Raises:
            WireError: what came is no call.
        """
        while True:
            try:
                frames = self._calls.read(timeout_s=_IDLE_S)
            except TimeoutError:
                continue
            except EOFError as end:
                logger.info("ending: %s", end)
                return
            self._call_number, self._doing = self._calls.num_read - 1, "reading a call"
            call = self._decoder.decode(frames)
            self._doing = rpc.label(call)
            yield self._call_number, call

    def reply(self, reply: rpc.Reply | None) -> None:
        if reply is None:
            raise TypeError(f"{self._doing} gave no result on the rank that replies")
        self._replies.write(
            self._encoder.encode(reply), f"reply to {self._doing}", timeout_s=self._timeout_s
        )

    def report(self, error: Exception) -> None:
        """Tell the engine core why this worker ends. It logs the first of all ranks' causes."""
        logger.warning("%s failed: %s; reported, ending", self._doing, type(error).__name__)
        failed = rpc.describe_failure(error, call=self._call_number, doing=self._doing)
        with contextlib.suppress(OSError):  # nobody reads: the exit code still tells
            self._replies.write(self._encoder.encode(failed), "failure", timeout_s=5.0)

    def close(self) -> None:
        for side_channel in self._side_channels:
            side_channel.close()
        self._context.term()


def _exit_at_once(exit_code: int) -> None:
    """Exit without the interpreter's clean-up: it takes half a second once torch is loaded, frees
    nothing that the kernel does not, and after a failure may wait for collectives for ever."""
    logging.shutdown()
    lifecycle.flush_streams()
    os._exit(exit_code)
