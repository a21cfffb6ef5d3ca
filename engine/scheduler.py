"""One step: who runs, how many tokens each, who is preempted; and what came of it.

There are no phases. A request has known tokens (prompt and output) and computed ones; a step gives
each request some of what is missing, out of one token budget:

    1. running requests, in order; who needs a block when none is free takes it from the last one,
    2. waiting requests, in order, but none in a step that preempted: it would take the same blocks.

Preemption is by recompute: the victim loses its blocks and goes back to the front of the queue;
when its turn comes it joins the workers' batch as a new request that knows all its tokens. The
running requests are kept in the order of the queue (arrival, or priority then arrival), so the
victim is always the last one, and never one that this step has scheduled already.

Several steps may be under way. A request counts tokens as computed when they are scheduled; one
whose sampled token is still to come back has nothing missing, and so is not scheduled again, while
a long prompt's next chunk is. With a pipeline of several stages a step takes only its share of the
decodes, so that there are as many steps under way as stages.

Planning ahead (async scheduling), one step more is under way, and a request whose sampled token is
still to come back is scheduled for that one, unless its length says that it is the last. Where it
turns out to be the last for another reason, the row was in vain:

    step n      r samples "the"        -> goes on
    step n + 1  "the", samples its end -> has ended      planned while step n ran
    step n + 2  its end, …             -> dropped        planned while step n + 1 ran

When a request ends or is preempted, what the steps under way bring for it is stale: `update`
drops it, knowing each request's `joined_step`. Why its blocks can be handed on at once is told in
`kv_cache_manager`.

A step in which requests with a structured output sample awaits their masks, which can be made as
soon as the token before is known: `take_unmasked`. Their matchers advance in `update`, with tokens
that are accepted, so a preempted request takes up where it was.

Pure: no clock, socket or thread; used by `core` only.
"""

import itertools
import logging
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec

from engine import stop
from engine.config import SchedulerConfig
from engine.kv_cache_manager import KVCacheManager
from engine.outbox import Outbox
from engine.request import Request, Status
from engine.request_queue import make_queue
from engine.stats import Counters
from engine.step import (
    NO_TOKEN,
    OWN_TOKEN,
    ContinuedRequests,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)
from engine.wire import EventKind, FinishReason, SchedulerStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """A plan while it is made, then what must be remembered until its reply is there."""

    number: int
    budget: int
    """Tokens that may still be scheduled."""
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_requests: list[NewRequest] = field(default_factory=list)
    continued: ContinuedRequests = field(default_factory=lambda: ContinuedRequests([], [], [], []))
    sampling: list[Request] = field(default_factory=list)
    """Requests whose tokens will all be computed: they sample one, in this order."""
    awaits_masks: bool = False
    """Some of them have a structured output, and the workers wait for what they may sample."""
    reserved_blocks: int = 0
    """Blocks that the scheduled requests still lack for the rest of their prompts."""


class Scheduler:
    """All requests of one engine core."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        pipeline_parallel_size: int = 1,
        plans_ahead: bool = False,
    ) -> None:
        self.counters = Counters()
        self.outbox = Outbox()
        self._config = config
        self._kv_cache = kv_cache
        self._num_stages = pipeline_parallel_size
        self._plans_ahead = plans_ahead
        self._requests: dict[str, Request] = {}
        self._waiting = make_queue(config.policy)
        self._running: list[Request] = []
        """By sort key."""
        self._steps: deque[_Step] = deque()
        """Under way, oldest first."""
        self._dropped: list[str] = []
        """Requests that the workers hold and the next plan tells them to drop."""
        self._num_by_client: list[int] = []
        """Requests that wait or run, by client index."""
        self._num_structured = 0
        """Requests with a structured output."""
        self._last_step = 0
        self._arrivals = itertools.count()

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request, now: float) -> bool:
        """Queue `request`. False, and nothing changes, if its id is taken."""
        if request.request_id in self._requests:
            return False
        arrival = next(self._arrivals)
        is_fcfs = self._config.policy == "fcfs"
        request.sort_key = (
            (arrival,) if is_fcfs else (request.priority, request.arrival_time, arrival)
        )
        self._requests[request.request_id] = request
        self._count(request.client_index)
        self._num_structured += request.matcher is not None
        self._waiting.add(request)
        self.outbox.record(request, EventKind.QUEUED, now)
        return True

    def _count(self, client_index: int) -> None:
        counts = self._num_by_client
        if client_index >= len(counts):
            counts.extend([0] * (client_index + 1 - len(counts)))
        counts[client_index] += 1

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at once. Ids that are unknown, or known no longer, are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.status is Status.RUNNING:
                self._running.remove(request)
            else:
                self._waiting.remove(request)
            self.outbox.put(request, b"", FinishReason.ABORT)
            self._finish(request)

    def request_ids_of(self, client_index: int, arrived_before: float) -> list[str]:
        """Those of one API server that came to it before a time."""
        return [
            request_id
            for request_id, request in self._requests.items()
            if request.client_index == client_index and request.arrival_time < arrived_before
        ]

    # ------------------------------------------------------------------------ before the step

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step; None if there is nothing to compute."""
        step = _Step(self._last_step + 1, self._config.max_num_batched_tokens)
        if not self._schedule_running(step, now):
            self._schedule_waiting(step, now)
        if not step.num_scheduled_tokens:
            return None
        self._last_step += 1
        self._steps.append(step)
        dropped, self._dropped = self._dropped, []
        step.awaits_masks = bool(self._num_structured) and any(
            request.matcher is not None for request in step.sampling
        )
        return SchedulerOutput(
            step.number,
            step.num_scheduled_tokens,
            step.new_requests,
            step.continued,
            dropped,
            step.awaits_masks,
        )

    def take_unmasked(self) -> tuple[int, list[Request]] | None:
        """The step whose masks are due, by number, and its requests with a structured output; None
        if there is none, or if one of them still waits for the token before. Only once."""
        for step in self._steps:
            if step.awaits_masks:
                structured = [
                    request
                    for request in step.sampling
                    if request.matcher is not None and not self._is_stale(request, step)
                ]
                if any(r.num_computed_tokens > r.num_tokens for r in structured):
                    return None
                step.awaits_masks = False
                return step.number, structured
        return None

    def _schedule_running(self, step: _Step, now: float) -> bool:
        """Give running requests their next tokens. Returns whether any of them was preempted."""
        has_preempted = False
        decodes_left = -(-len(self._running) // self._num_stages)
        index = 0
        while index < len(self._running) and step.budget:
            request = self._running[index]
            index += 1
            num_new = request.num_tokens - request.num_computed_tokens
            if num_new < 1:  # its sampled token is on its way back
                if not self._can_go_ahead(request):
                    continue
                num_new, request.unsent_token = 1, OWN_TOKEN
            if num_new == 1:
                if not decodes_left:
                    continue
                decodes_left -= 1
            else:
                num_new = self._chunk(num_new, step.budget)
            new_blocks = self._kv_cache.extend(request, request.num_computed_tokens + num_new)
            while new_blocks is None:
                has_preempted = True
                if self._preempt_last(now) is request:
                    return True
                new_blocks = self._kv_cache.extend(request, request.num_computed_tokens + num_new)
            self._continue(step, request, new_blocks)
            self._take_tokens(step, request, num_new)
        return has_preempted

    def _can_go_ahead(self, request: Request) -> bool:
        """Whether the token that `request` samples now may be computed before it has come back."""
        return (
            self._plans_ahead
            and request.num_computed_tokens == request.num_tokens
            and request.num_tokens + 1 < request.max_num_tokens
        )

    def _schedule_waiting(self, step: _Step, now: float) -> None:
        """Admit waiting requests as long as budget, seats and blocks are left. The first that does
        not fit holds up the others: nobody is overtaken for ever."""
        while self._waiting and step.budget and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.peek()
            # One more block for each running request, which it will soon ask for: without it every
            # second admission ended in a preemption (measured on a full pool of 1,000 blocks: 347
            # preemptions for 400 requests, now 14).
            reserved = step.reserved_blocks + len(self._running)
            if self._kv_cache.still_refuses(request, reserved):
                return
            cached = self._kv_cache.find_cached(request)
            num_cached = len(cached) * request.block_size
            num_new = self._chunk(request.num_tokens - num_cached, step.budget)
            if num_new > step.budget:
                return
            if not self._kv_cache.admit(request, cached, num_cached + num_new, reserved):
                return
            self._waiting.pop()
            self._join(step, request, num_cached, now)
            self._take_tokens(step, request, num_new)

    def _chunk(self, num_new: int, budget: int) -> int:
        """How many of `num_new` missing tokens may run in one step."""
        if not self._config.enable_chunked_prefill:
            return num_new
        threshold = self._config.long_prefill_token_threshold
        return min(num_new, budget, threshold) if threshold else min(num_new, budget)

    def _continue(self, step: _Step, request: Request, new_blocks: list[int]) -> None:
        """The workers know `request`: tell them what is new."""
        continued = step.continued
        continued.request_ids.append(request.request_id)
        continued.num_computed_tokens.append(request.num_computed_tokens)
        continued.new_token_ids.append(request.unsent_token)
        continued.new_block_ids.append(new_blocks)
        request.unsent_token = b""

    def _join(self, step: _Step, request: Request, num_cached: int, now: float) -> None:
        """`request` runs from now on; the workers get the whole of it."""
        request.move_to(Status.RUNNING)
        request.joined_step = step.number
        request.num_computed_tokens = num_cached
        insort(self._running, request, key=attrgetter("sort_key"))
        self.outbox.record(request, EventKind.SCHEDULED, now)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            if request.can_share_blocks:
                self.counters.prefix_cache_queries += request.num_prompt_tokens
                self.counters.prefix_cache_hits += request.num_cached_tokens
        step.new_requests.append(
            NewRequest(
                request.request_id,
                request.token_array(),
                request.num_prompt_tokens,
                num_cached,
                list(request.block_ids),
                request.params_for_workers(),
            )
        )

    def _take_tokens(self, step: _Step, request: Request, num_new: int) -> None:
        """Charge the step with `num_new` tokens of `request`, for which it has the blocks."""
        step.budget -= num_new
        step.num_scheduled_tokens[request.request_id] = num_new
        request.num_computed_tokens += num_new
        if request.num_computed_tokens >= request.num_tokens:
            step.sampling.append(request)
        else:
            step.reserved_blocks += self._kv_cache.num_missing_blocks(request)
        self._kv_cache.register(request)

    def _preempt_last(self, now: float) -> Request:
        """Take the blocks of the running request that comes last, and return it."""
        # Last come or least urgent: it has waited least, and the oldest always gets on.
        victim = self._running.pop()
        victim.move_to(Status.PREEMPTED)
        self._kv_cache.free(victim)
        victim.restart()
        self._dropped.append(victim.request_id)
        self._waiting.put_back(victim)
        self.outbox.record(victim, EventKind.PREEMPTED, now)
        self.counters.num_preemptions += 1
        return victim

    # ------------------------------------------------------------------------- after the step

    def update(self, plan: SchedulerOutput, reply: ModelRunnerOutput) -> None:
        """Take in what the oldest step under way has computed; outputs wait in the outbox."""
        step = self._steps.popleft()
        expected = [request.request_id for request in step.sampling]
        if not step.number == plan.step == reply.step or reply.request_ids != expected:
            # Not an ExecutorError: of those, the executor has logged the first cause already.
            raise RuntimeError(
                f"the workers' reply to step {step.number} does not fit it: it is to step"
                f" {reply.step} with tokens of {_some(reply.request_ids)}, where tokens of"
                f" {_some(expected)} are due"
            )
        if reply.prompt_logprobs:
            self._keep_prompt_logprobs(step, reply)
        num_before = len(self._requests)
        for request, token_id in zip(step.sampling, reply.sampled_token_ids.tolist(), strict=True):
            if not self._is_stale(request, step):
                self._accept(request, token_id, reply)
        if len(self._requests) < num_before:
            self._running = [r for r in self._running if r.status is Status.RUNNING]
        self.outbox.put_news()
        self.counters.num_steps += 1

    def _is_stale(self, request: Request, step: _Step) -> bool:
        """Whether `request` has left the batch since `step` was planned."""
        return request.status is not Status.RUNNING or request.joined_step > step.number

    def _accept(self, request: Request, token_id: int, reply: ModelRunnerOutput) -> None:
        """`request` has its next token: put it out, and see whether it was the last."""
        if token_id == NO_TOKEN:
            raise RuntimeError(f"the workers have left out {request}, which has not ended")
        if request.matcher is not None and not request.matcher.accept(token_id):
            self._fail(request, request.matcher.fault or "")
            return
        packed = token_id.to_bytes(4, "little")
        request.append(token_id, packed)
        reason = stop.finish_reason(request)
        logprobs = reply.logprobs.get(request.request_id) if reply.logprobs else None
        is_first = not request.has_sent_token
        self.outbox.put(request, packed, reason, logprobs, is_first)
        if is_first:
            request.has_sent_token = True
            request.prompt_logprobs = []
            self.counters.num_prompt_tokens += request.num_prompt_tokens
        self.counters.num_generation_tokens += 1
        if reason is not None:
            self._finish(request)
        elif not request.num_tokens % request.block_size:
            self._kv_cache.register(request)  # planned ahead, its block was full but for the hash

    def _fail(self, request: Request, cause: str) -> None:
        """End `request` with an error of its own."""
        logger.warning("request_id=%s failed: %s", request.request_id, cause)
        self.outbox.put(request, b"", FinishReason.ERROR, error=cause)
        self._finish(request)

    def _keep_prompt_logprobs(self, step: _Step, reply: ModelRunnerOutput) -> None:
        """Collect them chunk by chunk: they go out whole, with the first token."""
        for request_id, logprobs in reply.prompt_logprobs.items():
            request = self._requests.get(request_id)
            if request is None or self._is_stale(request, step):
                continue
            if request.wants_prompt_logprobs:
                request.prompt_logprobs.append(logprobs)

    def _finish(self, request: Request) -> None:
        """Forget `request`; the caller takes it out of the running or waiting ones."""
        if request.status is Status.RUNNING:
            self._dropped.append(request.request_id)
        request.move_to(Status.FINISHED)
        self._kv_cache.free(request)
        self.outbox.forget(request)
        self._num_by_client[request.client_index] -= 1
        self._num_structured -= request.matcher is not None
        del self._requests[request.request_id]

    # -------------------------------------------------------------------------------- state

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def load(self) -> tuple[int, ...]:
        """Requests that wait; then, by client, those that wait or run. For comparing: while it is
        the same, nobody need be told of the load. Cheap enough for every step."""
        return len(self._waiting), *self._num_by_client

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. Refused (False) while any request holds a block."""
        return self._kv_cache.reset_prefix_cache()

    def stats(self, num_dropped_messages: int) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            kv_cache_usage=self._kv_cache.usage,
            num_dropped_messages=num_dropped_messages,
            num_by_client=self._num_by_client.copy(),
            num_evicted_blocks=self._kv_cache.num_evicted_blocks,
            **msgspec.structs.asdict(self.counters),
        )

    def validate(self) -> None:
        """Check every invariant. For tests."""
        waiting = list(self._waiting)
        assert {r.request_id: r for r in [*waiting, *self._running]} == self._requests
        assert len(waiting) + len(self._running) == len(self._requests)
        assert self._num_structured == sum(r.matcher is not None for r in self._requests.values())
        by_client = {index: count for index, count in enumerate(self._num_by_client) if count}
        assert by_client == Counter(r.client_index for r in self._requests.values())
        assert all(r.status is Status.RUNNING for r in self._running)
        assert all(r.status in (Status.WAITING, Status.PREEMPTED) for r in waiting)
        assert all(not r.block_ids and not r.num_computed_tokens for r in waiting)
        assert self._running == sorted(self._running, key=attrgetter("sort_key"))
        assert len(self._running) <= self._config.max_num_seqs
        for request in self._running:
            assert request.num_tokens < request.max_num_tokens
            if request.num_computed_tokens > request.num_tokens:
                assert self._plans_ahead
                assert request.num_computed_tokens == request.num_tokens + 1
                assert request.num_computed_tokens < request.max_num_tokens
            assert request.num_computed_tokens <= len(request.block_ids) * request.block_size
        self._kv_cache.validate(self._running)
        self.outbox.validate(self._requests)


def _some(request_ids: list[str]) -> str:
    """Request ids in an error, of which there may be hundreds."""
    return f"{len(request_ids)} requests {request_ids[:8]}"
