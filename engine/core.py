"""EngineCore: schedule, execute, update. No sockets, no threads.

`process` owns the loop around it: it feeds `add` and `abort` from its queues, calls `step` while
there is work, and sends what comes back. `prepare` alone is called from another thread. The workers
are behind `Executor`; whatever goes wrong with them comes out of `step` as ExecutorError, and then
the engine core is dead.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from engine import admission
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor import Executor
from engine.grammar import masks
from engine.kv_cache_manager import KVCacheManager
from engine.kv_sizing import size_kv_cache
from engine.pace import Pace
from engine.request import Request, from_wire
from engine.scheduler import Scheduler
from engine.step import KVCacheSpec, ModelRunnerOutput, SchedulerOutput, WorkerReport
from engine.wire import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Phase,
    SchedulerStats,
)

logger = logging.getLogger(__name__)


class EngineCore:
    """The model of one data-parallel rank, its requests and its KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        num_dropped_messages: Callable[[], int] = lambda: 0,
    ) -> None:
        """Load the model through `executor`, size and allocate the KV cache.

        Args:
            config: settings of this engine core.
            executor: the workers.
            clock: of all times that are sent.
            num_dropped_messages: counted by the input thread; `stats` passes it on.

        Raises:
            ConfigError: model, memory and settings do not go together.
            ExecutorError: the workers failed.
        """
        self.executor = executor
        self._config = config
        self._clock = clock
        self._num_dropped_messages = num_dropped_messages
        reports = executor.load()
        size = size_kv_cache(reports, config.model, config.cache)
        self.block_size = size.block_size
        self.num_gpu_blocks = size.num_blocks
        self.max_model_len = size.max_model_len
        self.kv_cache_size_tokens = size.num_tokens
        self.vocab_size = min(report.vocab_size for report in reports)
        self.dtype = reports[0].dtype
        self.slowest = max(reports, key=lambda report: report.load_s)
        """Of the workers: the others have waited for it."""
        self._check_budget()
        loaded_at = clock()
        executor.initialize_kv_cache(
            KVCacheSpec(
                num_blocks=size.num_blocks,
                block_size=size.block_size,
                max_model_len=size.max_model_len,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            )
        )
        self.kv_cache_s = clock() - loaded_at
        self._num_stages = config.parallel.pipeline_parallel_size
        self._plans_ahead = _plans_ahead(config, reports)
        self._pace = Pace()
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        """Oldest first. Where steps are planned ahead, the second waits while the first runs."""
        self._scheduler = Scheduler(
            config.scheduler,
            KVCacheManager(size.num_blocks, size.block_size),
            pipeline_parallel_size=self._num_stages,
            plans_ahead=self._plans_ahead,
        )
        self._log_start(reports)
        self.enter(Phase.IDLE)

    # ------------------------------------------------------------------ requests come and go

    def prepare(self, request: EngineCoreRequest) -> Request:
        """Check `request` and make it ready for `add`: the slow part, the hashing of its blocks, is
        done here. Thread-safe.

        Raises:
            RequestError: this engine core cannot serve it.
        """
        admission.check(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        return from_wire(
            request,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            is_cached=self._config.cache.enable_prefix_caching,
        )

    def add(self, request: Request) -> None:
        """Queue a prepared request. One whose id is taken is dropped, and logged."""
        if not self._scheduler.add(request, self._clock()):
            # API servers make ids unique, so this is a fault in a peer. It gets no error: that
            # would end the stream of the older request, which goes by the same id.
            logger.warning("dropped a request whose id is taken: %s", request.request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; each gets one last output, from the next `step`. Ids that are unknown or
        come again are ignored."""
        self._scheduler.abort(request_ids)

    def drop_client(self, client_index: int, arrived_before: float) -> int:
        """End all requests of an API server that is gone; see `utility.Target`."""
        request_ids = self._scheduler.request_ids_of(client_index, arrived_before)
        self._scheduler.abort(request_ids)
        return len(request_ids)

    # -------------------------------------------------------------------------------- the step

    def step(
        self, drain_aborts: Callable[[], None], take: Callable[[], None] = lambda: None
    ) -> dict[int, EngineCoreOutputs]:
        """Run the oldest step under way to its end and return what it brought, by client index.

        Args:
            drain_aborts: called right after the forward pass, so that an aborted request costs at
                most the steps under way and gets no token of theirs. It may call `abort`.
            take: called before a step is planned while one runs, so that the newest requests have a
                part in it. It may call anything but `step`.
        """
        self._fill_stages()
        if self._in_flight:
            if self._plans_ahead:
                self._plan_ahead(take)
            plan, reply = self._execute()
            drain_aborts()
            self._update(plan, reply)
        outputs = self._collect()
        self.enter(Phase.IDLE)
        return outputs

    def _fill_stages(self) -> None:
        """See to it that there is one step under way for each stage."""
        while len(self._in_flight) < self._num_stages and self._schedule():
            pass
        if not self._in_flight and self._scheduler.num_requests:
            # Would loop for ever. `kv_sizing` makes sure that any one request fits.
            raise RuntimeError("no request can run and none is running")

    def _plan_ahead(self, take: Callable[[], None]) -> None:
        """Plan the step after the one that runs, shortly before that ends. If it has ended sooner
        than expected, its outputs go first."""
        self.enter(Phase.EXECUTE)
        if (patience_s := self._pace.seconds_left(self._clock())) > 0:
            with contextlib.suppress(TimeoutError):
                self._in_flight[0][1].exception(patience_s)
                return
        take()
        self._schedule()

    def _schedule(self) -> bool:
        """Plan a step and send it to the workers. False if there is nothing to compute."""
        self.enter(Phase.SCHEDULE)
        plan = self._scheduler.schedule(self._clock())
        if plan is None:
            return False
        self._in_flight.append((plan, self.executor.execute(plan)))
        self._send_masks()
        if len(self._in_flight) == 1:
            self._note_begin()
        return True

    def _send_masks(self) -> None:
        """Say what may be sampled in the steps under way that wait for it, as far as it is known.

            ring:  plan n   masks n   plan n + 1   masks n + 1      workers compute meanwhile
                                      sent while n runs
                                                   once the tokens of n are known

        So a step has its masks before the next one is sent: with pipeline stages at once, since no
        request is in two steps; where steps are planned ahead, with the reply to the last one.
        """
        while (unmasked := self._scheduler.take_unmasked()) is not None:
            self.executor.sample(masks.fill(*unmasked, self.vocab_size))

    def _execute(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Wait for the oldest step under way."""
        self.enter(Phase.EXECUTE)
        plan, future = self._in_flight.popleft()
        reply = future.result()
        self._pace.end(self._clock())
        if self._in_flight:
            self._note_begin()
        return plan, reply

    def _note_begin(self) -> None:
        """The oldest step under way begins."""
        num_tokens = sum(self._in_flight[0][0].num_scheduled_tokens.values())
        self._pace.begin(num_tokens, self._clock())

    def _update(self, plan: SchedulerOutput, reply: ModelRunnerOutput) -> None:
        self.enter(Phase.UPDATE)
        self._scheduler.update(plan, reply)
        self._send_masks()

    def _collect(self) -> dict[int, EngineCoreOutputs]:
        outputs = self._scheduler.outbox.take()
        if not outputs:
            return {}
        rank, epoch = self._config.parallel.engine_index, self._config.wire.epoch
        stats, now = self.stats(), self._clock()
        return {
            client_index: EngineCoreOutputs(rank, epoch, batch, stats, now)
            for client_index, batch in outputs.items()
        }

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to hand out."""
        scheduler = self._scheduler
        return bool(self._in_flight or scheduler.num_requests or not scheduler.outbox.is_empty)

    def enter(self, phase: Phase) -> None:
        """Note what the engine core does from now on, for heartbeats (read by another thread)."""
        self.phase_began = self._clock()
        self.phase = phase

    @property
    def num_steps(self) -> int:
        return self._scheduler.counters.num_steps

    # ------------------------------------------------------------------------------ utilities

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. Refused (False) while any request holds a block."""
        return self._scheduler.reset_prefix_cache()

    def load(self) -> tuple[int, ...]:
        """Changes when there is something new to tell of the load (`Scheduler.load`)."""
        return self._scheduler.load()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats(self._num_dropped_messages())

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.executor.close()

    def validate(self) -> None:
        """Check every invariant. For tests."""
        self._scheduler.validate()

    # ------------------------------------------------------------------------------- start-up

    def _check_budget(self) -> None:
        settings = self._config.scheduler
        if settings.enable_chunked_prefill:
            return
        if settings.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt runs in one step, so --max-num-batched-tokens"
                f" {settings.max_num_batched_tokens} must be at least --max-model-len"
                f" {self.max_model_len}"
            )

    def _log_start(self, reports: Sequence[WorkerReport]) -> None:
        for report in reports:
            logger.info("rank=%d %s", report.rank, report.description)
        logger.info(
            "num_gpu_blocks=%d kv_cache_size_tokens=%d max_model_len=%d dtype=%s"
            " async_scheduling=%s",
            self.num_gpu_blocks,
            self.kv_cache_size_tokens,
            self.max_model_len,
            self.dtype,
            self._plans_ahead,
        )


def _plans_ahead(config: EngineConfig, reports: Sequence[WorkerReport]) -> bool:
    """Whether a step is planned before the tokens of the last one are known."""
    if config.parallel.world_size > 1:
        # Only the rank that samples has them; and a pipeline has a step for each stage anyway.
        return False
    asked = config.scheduler.async_scheduling
    return reports[0].has_free_core if asked is None else asked
