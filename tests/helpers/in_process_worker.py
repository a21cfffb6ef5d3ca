"""An executor whose only worker is in this process: an engine core over a real worker, without
processes, to look at and to stop at any point."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from engine.codec import Encoder
from engine.config import EngineConfig
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)
from workers import rpc
from workers.worker import Worker


class InProcessWorker:
    """Implements `engine.executor.Executor`. A step runs when somebody waits for it, so that the
    next one may have been planned before."""

    def __init__(self, config: EngineConfig) -> None:
        self.worker = Worker(config, rank=0, rendezvous="")
        self.plans: list[SchedulerOutput] = []
        self.replies: list[ModelRunnerOutput] = []
        self.masks: dict[int, TokenMasks] = {}
        """By step."""
        self._waiting: deque[tuple[_Step, SchedulerOutput]] = deque()
        self._encoder = Encoder()
        self._decoder = rpc.call_decoder()

    def load(self) -> Sequence[WorkerReport]:
        return [self.worker.load()]

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        self.worker.initialize_kv_cache(spec)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        call = self._send(rpc.execute_model(plan, 0))
        assert isinstance(call, rpc.ExecuteModel)
        if self.plans and self.plans[-1].awaits_masks:
            assert self.plans[-1].step in self.masks, "the last step still awaits its masks"
        step = _Step(self)
        self._waiting.append((step, call.args[0]))
        self.plans.append(plan)
        return step

    def sample(self, masks: TokenMasks) -> None:
        assert self.plans[-1].awaits_masks
        assert self.plans[-1].step == masks.step
        call = self._send(rpc.sample_tokens(masks, 0, 0))
        assert isinstance(call, rpc.SampleTokens)
        self.masks[masks.step] = call.args[0]

    def _send(self, call: rpc.Call) -> rpc.Call:
        """A call as it arrives."""
        return self._decoder.decode([bytes(frame) for frame in self._encoder.encode(call)])

    def run_next(self) -> None:
        """Run the oldest step that has not run."""
        step, plan = self._waiting.popleft()
        output = self.worker.execute_model(plan)
        if plan.awaits_masks:
            assert output is None
            output = self.worker.sample_tokens(self.masks[plan.step])
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
