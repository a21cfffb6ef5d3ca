"""Workers without a model, whose KV cache can be checked: the scheduler's examiner.

A real worker writes into each KV slot something that depends on its token and on all tokens before
it. So does this one: what it writes is the *context* of the token, a number made of the whole
sequence up to there. It knows nothing but the plans, encoded and decoded as on wire 2, and checks
from them alone, for each scheduled request, that every slot its block table names holds the context
of its own tokens: whatever the scheduler shared, freed, handed on or took over from the cache.

    plan -> rows as `engine.step` tells -> writes of all requests -> reads of all -> samples

A step whose requests have all ended with the tokens that were sampled last is left out, as real
workers do: nothing is written, so nobody may count on it.

The next token is a function of the context, so each request has one right answer, which
`right_answer` gives without any of this. A salt is made part of the context by way of the request
id ("7@salt"), as it may not share blocks with other salts.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.codec import Decoder, Encoder, unpack_tokens
from engine.config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.step import (
    NO_TOKEN,
    OWN_TOKEN,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)
from engine.wire import FinishReason, Logprobs

Masks = Mapping[str, Collection[int]]
"""What requests may sample, by id; all others may sample anything."""

_Unsampled = tuple[int, Callable[[Masks], ModelRunnerOutput], Future[ModelRunnerOutput]]
"""A step that awaits its masks: its number, how it goes on, and what it answers."""

EMPTY = 0
"""Content of a slot that was never written."""


def first_context(request_id: str) -> int:
    """What stands before the first token: the salt."""
    salt = request_id.partition("@")[2]
    return 1 + sum(salt.encode())


def next_context(context: int, token_id: int) -> int:
    """The context after one more token. Hashes of integers are the same in every process."""
    return hash((context, token_id))


def next_token(
    context: int,
    num_output: int,
    params: SamplingParams,
    vocab_size: int,
    possible: Collection[int] | None = None,
) -> int:
    """What the model says after `context`, of what is `possible`, with stop tokens masked as a
    sampler must."""
    masked: set[int] = set()
    if num_output < params.min_tokens:
        masked = {*params.stop_token_ids, *params.eos_token_ids}
    tokens = list(range(vocab_size) if possible is None else possible)
    allowed = [token for token in tokens if token not in masked] or tokens
    return allowed[context % len(allowed)]


def right_answer(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    output: Sequence[int] = (),
) -> tuple[list[int], FinishReason]:
    """The tokens after `output` that `request_id` must get, and why it ends."""
    context = first_context(request_id)
    for token in [*prompt, *output]:
        context = next_context(context, token)
    tokens = list(output)
    ends = _ends(params)
    while True:
        tokens.append(next_token(context, len(tokens), params, vocab_size))
        context = next_context(context, tokens[-1])
        if tokens[-1] in ends and len(tokens) >= params.min_tokens:
            return tokens[len(output) :], FinishReason.STOP
        if len(tokens) == params.max_tokens or len(prompt) + len(tokens) == max_model_len:
            return tokens[len(output) :], FinishReason.LENGTH


def _ends(params: SamplingParams) -> set[int]:
    eos = () if params.ignore_eos else params.eos_token_ids
    return {*params.stop_token_ids, *eos}


@dataclass
class Row:
    """What a worker remembers of one request in its batch."""

    token_ids: list[int]
    contexts: list[int]
    """Of each token: what its slot must hold."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    first_context: int
    sampled: int | None = None
    """Sampled by the last step, not yet heard of again."""
    sampled_step: int = 0
    has_ended: bool = False
    """With its last token, as far as a worker can tell."""

    def append(self, token_id: int) -> None:
        before = self.contexts[-1] if self.contexts else self.first_context
        self.token_ids.append(token_id)
        self.contexts.append(next_context(before, token_id))

    def append_own(self) -> None:
        """Put in the token that was sampled last, and see whether it is the end."""
        assert self.sampled is not None, "no token of its own"
        self.append(self.sampled)
        params, num_output = self.sampling_params, len(self.token_ids) - self.num_prompt_tokens
        self.has_ended = self.sampled in _ends(params) and num_output >= params.min_tokens


@dataclass
class SimulatedWorkers:
    """Implements `engine.executor.Executor`. Breaks with AssertionError at the first wrong plan."""

    vocab_size: int = 5
    model_max_len: int = 1 << 20
    limits: SchedulerConfig = field(default_factory=SchedulerConfig)
    plans: list[SchedulerOutput] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    num_ahead: int = 0
    """Rows that went on with a token of their own."""
    num_left_out: int = 0
    """Steps that had nothing but ended requests."""
    _unsampled: _Unsampled | None = None

    def load(self) -> Sequence[WorkerReport]:
        return [
            WorkerReport(
                rank=0,
                dtype="float32",
                vocab_size=self.vocab_size,
                model_max_len=self.model_max_len,
                kv_bytes_per_token=1,
                kv_budget_bytes=1 << 20,
            )
        ]

    def initialize_kv_cache(self, spec: KVCacheSpec) -> None:
        self._block_size = spec.block_size
        self._kv = [EMPTY] * (spec.num_blocks * spec.block_size)
        self._encoder = Encoder()
        self._decoder = Decoder[SchedulerOutput](SchedulerOutput)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        frames = [bytes(frame) for frame in self._encoder.encode(plan)]
        future: Future[ModelRunnerOutput] = Future()
        run = functools.partial(self._run, self._decoder.decode(frames))
        assert self._unsampled is None, "the last step still awaits its masks"
        if plan.awaits_masks:
            self._unsampled = (plan.step, run, future)
        else:
            future.set_result(run({}))
        return future

    def sample(self, masks: TokenMasks) -> None:
        assert self._unsampled is not None, "nobody awaits masks"
        (step, run, future), self._unsampled = self._unsampled, None
        assert step == masks.step
        future.set_result(run(_unpacked(masks, self.vocab_size)))

    def statistics(self) -> Sequence[WorkerStats]:
        return [WorkerStats(0, 1, len(self.plans), 0, len(self.rows))]

    def profile(self, is_start: bool, directory: str) -> None: ...

    def close(self) -> None: ...

    # ------------------------------------------------------------------------------- one step

    def _run(self, plan: SchedulerOutput, masks: "Masks") -> ModelRunnerOutput:
        assert plan.step == len(self.plans) + 1
        self.plans.append(plan)
        for request_id in plan.dropped_request_ids:
            del self.rows[request_id]
        for new in plan.new_requests:
            self._join(new)
        self._go_on(plan)
        self._check_shape(plan)
        if all(self.rows[request_id].has_ended for request_id in plan.num_scheduled_tokens):
            return self._leave_out(plan)
        written: set[int] = set()
        for request_id, count in plan.num_scheduled_tokens.items():
            self._write(request_id, self.rows[request_id], count, written)
        for request_id, count in plan.num_scheduled_tokens.items():
            self._read(request_id, self.rows[request_id], count)
        return self._sample(plan, masks)

    def _join(self, new: NewRequest) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} joins twice"
        row = Row(
            token_ids=[],
            contexts=[],
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=list(new.block_ids),
            sampling_params=new.sampling_params,
            first_context=first_context(new.request_id),
        )
        for token in new.token_ids:
            row.append(int(token))
        assert new.num_computed_tokens < len(row.token_ids), "nothing left to sample from"
        self.rows[new.request_id] = row

    def _go_on(self, plan: SchedulerOutput) -> None:
        continued = plan.continued
        for request_id, num_computed, tokens, blocks in zip(
            continued.request_ids,
            continued.num_computed_tokens,
            continued.new_token_ids,
            continued.new_block_ids,
            strict=True,
        ):
            row = self.rows[request_id]
            assert row.num_computed_tokens == num_computed, f"{request_id}: computed tokens differ"
            if tokens == OWN_TOKEN:
                assert row.sampled_step == plan.step - 1, f"{request_id}: a token of long ago"
                row.append_own()
                self.num_ahead += 1
            else:
                new = unpack_tokens(tokens)
                assert new == ([] if row.sampled is None else [row.sampled]), f"{request_id}: {new}"
                for token in new:
                    row.append(token)
            row.sampled = None
            row.block_ids += blocks

    def _leave_out(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.num_left_out += 1
        request_ids = list(plan.num_scheduled_tokens)
        tokens = np.full(len(request_ids), NO_TOKEN, dtype="<u4")
        return ModelRunnerOutput(plan.step, request_ids, tokens)

    def _check_shape(self, plan: SchedulerOutput) -> None:
        new = [request.request_id for request in plan.new_requests]
        assert list(plan.num_scheduled_tokens) == [*plan.continued.request_ids, *new]
        assert sum(plan.num_scheduled_tokens.values()) <= self.limits.max_num_batched_tokens
        assert len(self.rows) <= self.limits.max_num_seqs
        if not self.limits.enable_chunked_prefill:
            for request_id, count in plan.num_scheduled_tokens.items():
                row = self.rows[request_id]
                assert row.num_computed_tokens + count == len(row.token_ids), "a chunk"
        elif self.limits.long_prefill_token_threshold:
            most = max(plan.num_scheduled_tokens.values())
            assert most <= self.limits.long_prefill_token_threshold

    def _slot(self, row: Row, position: int) -> int:
        block_id = row.block_ids[position // self._block_size]
        return block_id * self._block_size + position % self._block_size

    def _write(self, request_id: str, row: Row, count: int, written: set[int]) -> None:
        assert count > 0, f"{request_id} is scheduled without tokens"
        end = row.num_computed_tokens + count
        assert end <= len(row.token_ids), f"{request_id} runs past its tokens"
        for position in range(row.num_computed_tokens, end):
            slot = self._slot(row, position)
            assert slot >= self._block_size, f"{request_id} writes to the null block"
            assert slot not in written, f"{request_id} writes where another one has written"
            written.add(slot)
            self._kv[slot] = row.contexts[position]

    def _read(self, request_id: str, row: Row, count: int) -> None:
        row.num_computed_tokens += count
        for position in range(row.num_computed_tokens):
            content = self._kv[self._slot(row, position)]
            assert content == row.contexts[position], f"{request_id}: wrong KV at {position}"

    def _sample(self, plan: SchedulerOutput, masks: "Masks") -> ModelRunnerOutput:
        sampled: dict[str, int] = {}
        logprobs: dict[str, Logprobs] = {}
        prompt_logprobs: dict[str, Logprobs] = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            params = row.sampling_params
            if params.prompt_logprobs is not None:
                first = row.num_computed_tokens - count + 1
                known = row.token_ids[: row.num_prompt_tokens]
                if tokens := known[first : row.num_computed_tokens + 1]:
                    prompt_logprobs[request_id] = _logprobs(tokens)
            if row.num_computed_tokens == len(row.token_ids):
                num_output = len(row.token_ids) - row.num_prompt_tokens
                possible = masks.get(request_id)
                token = next_token(row.contexts[-1], num_output, params, self.vocab_size, possible)
                row.sampled = sampled[request_id] = token
                row.sampled_step = plan.step
                if params.logprobs is not None:
                    logprobs[request_id] = _logprobs([token])
        return ModelRunnerOutput(
            step=plan.step,
            request_ids=list(sampled),
            sampled_token_ids=np.asarray(list(sampled.values()), dtype="<u4"),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _unpacked(masks: TokenMasks, vocab_size: int) -> Masks:
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, vocab_size:].any(), "tokens that the model does not have"
    return {
        name: np.flatnonzero(row).tolist()
        for name, row in zip(masks.request_ids, bits, strict=True)
    }


def _logprobs(token_ids: list[int]) -> Logprobs:
    """One row a token, without alternatives, so that a test sees which tokens it is about."""
    return Logprobs(
        token_ids=np.asarray(token_ids, dtype="<u4").reshape(-1, 1),
        logprobs=np.zeros((len(token_ids), 1), dtype="<f4"),
        ranks=np.ones(len(token_ids), dtype="<u4"),
    )
