"""Worker processes for tests of tensor and pipeline parallelism: real ranks, real gloo.

    with RankPool() as pool:
        engine = pool.start(config, spec, rendezvous)
        output = engine.execute(plan)

Importing torch and transformers takes longer than any test here, so one process does it, the ranks
are forked from that, and they stay to get one worker after the other. Plans go to them over pipes:
the ring is somebody else's test.
"""

import multiprocessing
import operator
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any

from engine.config import EngineConfig
from engine.step import KVCacheSpec, ModelRunnerOutput, SchedulerOutput, WorkerReport
from workers.worker import Worker

TIMEOUT_S = 100.0


class RankPool:
    """Processes that can each hold one rank."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["workers.loader", "workers.causal_lm"])
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, pipe in self._ranks:
            pipe.close()  # which ends them
            process.join(5.0)
            process.kill()
            process.join()
            process.close()

    def start(
        self,
        config: EngineConfig,
        spec: KVCacheSpec,
        rendezvous: str,
        prepare: Callable[[Worker], None] | None = None,
    ) -> "RankGroup":
        """Load one worker per rank, each in a process of its own, and give them a KV cache.
        `prepare`, a module's own function or a partial one of it, is called in between."""
        size = config.parallel.world_size
        while len(self._ranks) < size:
            self._add_process()
        group = RankGroup([pipe for _, pipe in self._ranks[:size]], config.parallel.output_rank)
        for rank in range(size):
            group.send(rank, "start", config, rank, rendezvous)
        group.reports = group.receive_all()
        for rank in range(size):
            if prepare is not None:
                group.send(rank, "prepare", prepare)
                group.receive(rank)
            group.send(rank, "initialize_kv_cache", spec)
        group.receive_all()
        return group

    def _add_process(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append((process, ours))


class RankGroup:
    """The ranks of one engine."""

    def __init__(self, pipes: list[Connection], output_rank: int) -> None:
        self._pipes = pipes
        self._output_rank = output_rank
        self.reports: list[WorkerReport] = []

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step on all ranks, and return the reply of the one that has it."""
        for rank in range(len(self._pipes)):
            self.send(rank, "execute_model", plan)
        replies = self.receive_all()
        assert [r for r, reply in enumerate(replies) if reply is not None] == [self._output_rank]
        output = replies[self._output_rank]
        assert isinstance(output, ModelRunnerOutput)
        return output

    def send(self, rank: int, method: str, *args: object) -> None:
        self._pipes[rank].send((method, args))

    def receive(self, rank: int) -> Any:
        """Return a rank's answer to its oldest call. Raises what it raised."""
        return _checked(rank, self._answer(rank))

    def receive_all(self) -> list[Any]:
        """Return the answers of all ranks. Raises what the first of them raised, with none left in
        a pipe for the next group."""
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        return [_checked(rank, answer) for rank, answer in enumerate(answers)]

    def _answer(self, rank: int) -> Any:
        if not self._pipes[rank].poll(TIMEOUT_S):
            raise TimeoutError(f"rank {rank} has not answered for {TIMEOUT_S} s")
        return self._pipes[rank].recv()


@dataclass
class _Failure:
    error: Exception
    trace: str


def _checked(rank: int, answer: Any) -> Any:
    if isinstance(answer, _Failure):
        raise answer.error from RuntimeError(f"in rank {rank}:\n{answer.trace}")
    return answer


def _serve(pipe: Connection) -> None:
    """Hold one worker after the other, until the pipe closes. Entry of the processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    worker: Worker | None = None
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if method == "start":
                if worker is not None:
                    worker.close()
                worker = Worker(*args)
                pipe.send(worker.load())
            elif method == "prepare":
                pipe.send(args[0](worker))
            else:
                pipe.send(operator.attrgetter(method)(worker)(*args))
        except Exception as error:  # noqa: BLE001  (the top of a process: the test gets it)
            pipe.send(_Failure(error, traceback.format_exc()))
