"""An executor without workers: follows each plan as real workers must, and samples from a script.

For tests of the scheduler, the core and its process. It keeps what workers keep (the tokens each
request is known by, how many of them are computed, its blocks), so a plan that contradicts what was
sent before fails here with an AssertionError rather than going unnoticed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.codec import unpack_tokens
from engine.config import EngineConfig
from engine.errors import ConfigError, ExecutorError, RequestFailedError
from engine.sampling_params import SamplingParams
from engine.step import (
    OWN_TOKEN,
    ContinuedRequests,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)
from engine.wire import Logprobs

Script = Callable[[str, int], int]
"""(request id, index of the output token) to the token."""


def count_up(request_id: str, index: int) -> int:
    """Output token i is 100 + i, whoever asks."""
    return 100 + index


@dataclass
class Row:
    """What a worker remembers of one request in its batch."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    sampled: int = 0
    """The token that it sampled last."""


@dataclass
class FakeExecutor:
    """Implements `engine.executor.Executor`."""

    script: Script = count_up
    vocab_size: int = 1000
    model_max_len: int = 4096
    kv_bytes_per_token: int = 64
    kv_budget_bytes: int = 64 * 16 * 1024
    num_workers: int = 1
    has_free_core: bool = False
    holds: bool = False
    """True: a step is answered only when the test calls `release`."""

    step_delay_s: float = 0.0
    load_delay_s: float = 0.0
    refuse_load: str | None = None
    """Raise ConfigError with this text while loading."""

    hang_at_step: int | None = None
    """Never answer the n-th call of `execute` (from 0)."""

    raise_at_step: int | None = None
    """Raise a ZeroDivisionError, as a bug would, in the n-th call of `execute`."""

    fail_at_step: int | None = None
    """Fail as dead workers do: `on_failure`, then ExecutorError from the future."""

    fail_after_s: float | None = None
    """Call `on_failure` that long after loading, as a monitor does when a worker dies."""

    refuse_profile_start: bool = False
    """Raise RequestFailedError from each start of the profiler, which some ranks have obeyed."""

    refuse_profile_stop: bool = False
    """Raise RequestFailedError from each stop of the profiler, which all ranks have obeyed."""

    on_failure: Callable[[str], None] | None = None

    plans: list[SchedulerOutput] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    spec: KVCacheSpec | None = None
    profiles: list[tuple[bool, str]] = field(default_factory=list)
    is_closed: bool = False
    _held: deque[tuple[Future[ModelRunnerOutput], ModelRunnerOutput]] = field(default_factory=deque)

    # ------------------------------------------------------------------ the executor's protocol

    def load(self) -> Sequence[WorkerReport]:
        if self.refuse_load is not None:
            raise ConfigError(self.refuse_load)
        if self.load_delay_s:
            time.sleep(self.load_delay_s)
        if self.fail_after_s is not None and self.on_failure is not None:
            cause = "worker rank=0 pid=1 died while idle"
            threading.Timer(self.fail_after_s, self.on_failure, (cause,)).start()
        return [
            WorkerReport(
                rank=rank,
                dtype="float32",
                vocab_size=self.vocab_size,
                model_max_len=self.model_max_len,
                kv_bytes_per_token=self.kv_bytes_per_token,
                kv_budget_bytes=self.kv_budget_bytes,
                has_free_core=self.has_free_core,
            )
            for rank in range(self.num_workers)
        ]

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        self.spec = spec

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        number = len(self.plans)
        self.plans.append(plan)
        if self.step_delay_s:
            time.sleep(self.step_delay_s)
        future: Future[ModelRunnerOutput] = Future()
        if number == self.raise_at_step:
            raise ZeroDivisionError(f"scripted fault in step {number}")
        output = self._run(plan)
        if number == self.fail_at_step:
            self._fail(f"worker rank=0 pid=1 died in step {number}", future)
        elif number != self.hang_at_step:
            self._answer(future, output)
        return future

    def sample(self, masks: TokenMasks) -> None:
        raise NotImplementedError("scripted tokens heed no masks")

    def statistics(self) -> Sequence[WorkerStats]:
        return [
            WorkerStats(rank, 4711 + rank, len(self.plans), 1 << 20, len(self.rows))
            for rank in range(self.num_workers)
        ]

    def profile(self, is_start: bool, directory: str) -> None:
        self.profiles.append((is_start, directory))
        if is_start and self.refuse_profile_start:
            raise RequestFailedError("rank 1 cannot profile")
        if not is_start and self.refuse_profile_stop:
            raise RequestFailedError("rank 1 cannot write its trace")

    def close(self) -> None:
        self.is_closed = True

    # ------------------------------------------------------------------------------ for tests

    @property
    def num_held(self) -> int:
        """Steps in flight: asked for, not answered."""
        return len(self._held)

    def release(self, count: int = 1) -> None:
        """Answer the oldest steps in flight."""
        for _ in range(count):
            future, output = self._held.popleft()
            future.set_result(output)

    def _answer(self, future: Future[ModelRunnerOutput], output: ModelRunnerOutput) -> None:
        if self.holds:
            self._held.append((future, output))
        else:
            future.set_result(output)

    def _fail(self, cause: str, future: Future[ModelRunnerOutput]) -> None:
        if self.on_failure is not None:
            # The real one calls from its monitor thread.
            threading.Thread(target=self.on_failure, args=(cause,)).start()
        future.set_exception(ExecutorError(cause))

    # --------------------------------------------------------------------- what a worker does

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in plan.dropped_request_ids:
            del self.rows[request_id]
        for new in plan.new_requests:
            self._join(new)
        self._go_on(plan.continued)
        sampled: dict[str, int] = {}
        logprobs: dict[str, Logprobs] = {}
        prompt_logprobs: dict[str, Logprobs] = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            first = row.num_computed_tokens
            self._compute(request_id, row, count)
            width = row.sampling_params.prompt_logprobs
            known_next = min(row.num_computed_tokens, row.num_prompt_tokens - 1) - first
            if width is not None and known_next > 0:
                prompt_logprobs[request_id] = _logprobs(known_next, width)
            if row.num_computed_tokens == len(row.token_ids):
                index = len(row.token_ids) - row.num_prompt_tokens
                row.sampled = sampled[request_id] = self.script(request_id, index)
                if row.sampling_params.logprobs is not None:
                    logprobs[request_id] = _logprobs(1, row.sampling_params.logprobs)
        return ModelRunnerOutput(
            step=plan.step,
            request_ids=list(sampled),
            sampled_token_ids=np.asarray(list(sampled.values()), dtype="<u4"),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _join(self, new: NewRequest) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} joins twice"
        self.rows[new.request_id] = Row(
            token_ids=[int(token) for token in new.token_ids],
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=list(new.block_ids),
            sampling_params=new.sampling_params,
        )

    def _go_on(self, continued: ContinuedRequests) -> None:
        for request_id, computed, tokens, blocks in zip(
            continued.request_ids,
            continued.num_computed_tokens,
            continued.new_token_ids,
            continued.new_block_ids,
            strict=True,
        ):
            row = self.rows[request_id]
            assert row.num_computed_tokens == computed, f"{request_id}: computed tokens differ"
            row.token_ids += [row.sampled] if tokens == OWN_TOKEN else unpack_tokens(tokens)
            row.block_ids += blocks

    def _compute(self, request_id: str, row: Row, count: int) -> None:
        row.num_computed_tokens += count
        assert count > 0, f"{request_id} is scheduled without tokens"
        assert row.num_computed_tokens <= len(row.token_ids), f"{request_id} runs past its tokens"
        if self.spec is not None:
            room = len(row.block_ids) * self.spec.block_size
            assert row.num_computed_tokens <= room, f"{request_id} runs past its blocks"


def _logprobs(count: int, width: int) -> Logprobs:
    return Logprobs(
        token_ids=np.zeros((count, 1 + width), dtype="<u4"),
        logprobs=np.zeros((count, 1 + width), dtype="<f4"),
        ranks=np.ones(count, dtype="<u4"),
    )


def start_fake(
    config: EngineConfig,
    on_failure: Callable[[str], None],
    **settings: object,
) -> FakeExecutor:
    """A StartExecutor; `functools.partial` gives it settings, and a child process can import it."""
    executor = FakeExecutor(num_workers=config.parallel.world_size, **settings)  # type: ignore[arg-type]
    executor.on_failure = on_failure
    return executor
