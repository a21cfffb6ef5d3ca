"""An executor whose only worker is in this process: an engine core over a real worker, without
processes, to look at and to stop at any point."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from engine.codec import Encoder
from engine.config import EngineConfig
from engine.step import KVCacheSpec, ModelRunnerOutput, SchedulerOutput, WorkerReport, WorkerStats
from workers import rpc
from workers.worker import Worker


class InProcessWorker:
    """Implements `engine.executor.Executor`. A step runs when somebody waits for it, so that the
    next one may have been planned before."""

    def __init__(self, config: EngineConfig) -> None:
        self.worker = Worker(config, rank=0, rendezvous="")
        self.plans: list[SchedulerOutput] = []
        self.replies: list[ModelRunnerOutput] = []
        self._waiting: deque[tuple[_Step, SchedulerOutput]] = deque()
        self._encoder = Encoder()
        self._decoder = rpc.call_decoder()

    def load(self) -> Sequence[WorkerReport]:
        return [self.worker.load()]

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        self.worker.initialize_kv_cache(spec)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        frames = [bytes(frame) for frame in self._encoder.encode(rpc.execute_model(plan, 0))]
        call = self._decoder.decode(frames)
        assert isinstance(call, rpc.ExecuteModel)
        step = _Step(self)
        self._waiting.append((step, call.args[0]))
        self.plans.append(plan)
        return step

    def run_next(self) -> None:
        """Run the oldest step that has not run."""
        step, plan = self._waiting.popleft()
        output = self.worker.execute_model(plan)
        assert output is not None
        self.replies.append(output)
        step.set_result(output)

    def statistics(self) -> Sequence[WorkerStats]:
        return [self.worker.statistics()]

    def profile(self, is_start: bool, directory: str) -> None: ...

    def close(self) -> None:
        self.worker.close()


class _Step(Future[ModelRunnerOutput]):
    def __init__(self, owner: InProcessWorker) -> None:
        super().__init__()
        self._owner = owner

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        while not self.done():
            self._owner.run_next()
        return super().result(timeout)
