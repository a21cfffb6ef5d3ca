"""Everything an engine core asks of its workers. `workers/executor.py` implements it; tests pass
fakes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from engine.config import EngineConfig
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)


class Executor(Protocol):
    """The workers of one engine core, started and loaded. All calls come from the core's main
    thread.

    Calls are executed by every rank in the order they are made. Each of them raises ExecutorError,
    at the call or from the future, when a rank has failed, died, or not answered in time.
    """

    def load(self) -> Sequence[WorkerReport]:
        """Load the model on all ranks and return each rank's report, by rank."""

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        """Allocate the KV tensors on all ranks, and warm up."""

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step. Several may be under way, the core's limit is one for each pipeline stage,
        or two where steps are planned ahead; replies come in order. One that awaits masks has its
        reply once it has got them."""

    def sample(self, masks: TokenMasks) -> None:
        """Give masks to the last step that was executed, which awaits them."""

    def statistics(self) -> Sequence[WorkerStats]: ...

    def profile(self, is_start: bool, directory: str) -> None:
        """Start or stop a profiler on all ranks; stopping writes one trace file per rank into
        `directory`. Ranks where that is so already stay as they are.

        Raises:
            RequestFailedError: it did not work on some rank; the workers go on.
        """

    def close(self) -> None:
        """End all workers: ask, wait, kill. Idempotent, also after a failure."""


class StartExecutor(Protocol):
    """Starts the workers; handed to `engine.process.main` by `cluster`, so that the engine never
    imports them."""

    def __call__(self, config: EngineConfig, on_failure: Callable[[str], None]) -> Executor:
        """Start one process per rank. `on_failure` is called once, from any thread, with the first
        cause."""
