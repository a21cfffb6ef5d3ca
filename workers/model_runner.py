"""One step on one rank: prepare the inputs, run the model, sample.

Every rank of an engine gets the same plans and keeps the same rows, so no rank asks another which
tokens came out: the engine core sends what it accepted with the next plan. Only the rank that
replies has a sampler. Where one rank does all, the next plan may already be there when a step ends,
and the rank goes on with the tokens that it has sampled.
"""

import itertools
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.codec import pack_tokens
from engine.sampling_params import SamplingParams
from engine.step import (
    NO_TOKEN,
    ContinuedRequests,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)
from engine.wire import Logprobs, join_logprobs
from workers.input_batch import InputBatch, NewTokens, PromptRows, Step
from workers.sampler import SampledTokens, Sampler, prompt_logprobs

PROMPT_LOGPROB_ROWS = 128
"""Rows of logits at once for prompt log probabilities: those of a whole prompt may be gigabytes."""


class Model(Protocol):
    """What runs between prepare and sample: a `CausalLM`, or the scripted model."""

    vocab_size: int

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None: ...

    def forward(self, step: Step, batch: InputBatch) -> Tensor | None:
        """Return a state per token, or None where a later pipeline stage has them."""

    def logits(self, states: Tensor) -> Tensor | None:
        """Return `[len(states), vocab_size]` float32, or None where another tensor rank gets
        them."""


class ModelRunner:
    """Runs plans on one rank.

    Args:
        model: loaded, with its KV cache.
        batch: empty.
        sampler: on the rank that replies, None elsewhere.
    """

    def __init__(self, model: Model, batch: InputBatch, sampler: Sampler | None) -> None:
        self._model = model
        self._batch = batch
        self._sampler = sampler

    @property
    def num_requests(self) -> int:
        return len(self._batch)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step. Returns the reply, on the rank that replies."""
        self._update_sampler(plan, self._batch.update(plan))
        if self._batch.has_only_ended(plan):
            return self._leave_out(plan)

        step = self._batch.prepare(plan)
        states = self._model.forward(step, self._batch)
        if states is None:
            return None
        of_prompts = self._prompt_logprobs(step, states)
        sampled = self._sample(step, states)
        return self._reply(plan.step, step.sampling_ids, sampled, of_prompts)

    def warm_up(self, lengths: list[int], block_size: int) -> None:
        """Run prompts of these lengths in one step and a decode after it, so that the first request
        finds everything loaded. What this leaves in the cache belongs to nobody."""
        blocks = itertools.count()
        prompts = [
            NewRequest(
                request_id=f"warm-up-{i}",
                token_ids=np.zeros(length, np.uint32),
                num_prompt_tokens=length,
                num_computed_tokens=0,
                block_ids=list(itertools.islice(blocks, length // block_size + 1)),
                sampling_params=SamplingParams(temperature=0.0),
            )
            for i, length in enumerate(lengths)
        ]
        names, count = [prompt.request_id for prompt in prompts], len(prompts)
        grown = ContinuedRequests(names, lengths, [pack_tokens([0])] * count, [[]] * count)
        self.execute(
            SchedulerOutput(0, dict(zip(names, lengths, strict=True)), new_requests=prompts)
        )
        self.execute(SchedulerOutput(0, dict.fromkeys(names, 1), continued=grown))
        self.execute(SchedulerOutput(0, {}, dropped_request_ids=names))

    def _leave_out(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Answer a plan that has nothing to compute: no requests, or none that goes on."""
        request_ids = list(plan.num_scheduled_tokens)
        nothing = SampledTokens(np.full(len(request_ids), NO_TOKEN, np.uint32))
        return self._reply(plan.step, request_ids, nothing, {})

    def _update_sampler(self, plan: SchedulerOutput, new_tokens: NewTokens) -> None:
        """Tell the sampler who leaves, joins and grows."""
        if self._sampler is None:
            return
        for request_id in plan.dropped_request_ids:
            self._sampler.remove(request_id)
        for request in plan.new_requests:
            num_prompt = request.num_prompt_tokens
            self._sampler.add(
                request.request_id,
                request.sampling_params,
                request.token_ids[:num_prompt],
                request.token_ids[num_prompt:],
            )
        self._sampler.append(*new_tokens)

    def _sample(self, step: Step, states: Tensor) -> SampledTokens:
        """Return the next token of each request whose known tokens end in this step."""
        if not step.sampling_ids:
            return _NOTHING_SAMPLED
        if len(step.sampling_ids) < step.num_tokens:  # else a decode: all of them, in order
            states = states[step.sampling_rows]
        logits = self._model.logits(states)
        if logits is None or self._sampler is None:
            return _NOTHING_SAMPLED
        sampled = self._sampler.sample(logits, step.sampling_ids)
        self._batch.keep_sampled(step, sampled.token_ids)
        return sampled

    def _prompt_logprobs(self, step: Step, states: Tensor) -> dict[str, Logprobs]:
        """Return, by request that asked, the log probabilities of the prompt tokens that follow
        this step's."""
        return {
            asked.request_id: found
            for asked in step.prompt_rows
            if (found := self._logprobs_of(asked, states[asked.rows])) is not None
        }

    def _logprobs_of(self, asked: PromptRows, states: Tensor) -> Logprobs | None:
        token_ids = torch.from_numpy(asked.next_token_ids)
        parts = []
        for first in range(0, len(states), PROMPT_LOGPROB_ROWS):
            rows = slice(first, first + PROMPT_LOGPROB_ROWS)
            logits = self._model.logits(states[rows])  # on all tensor ranks: they share the work
            if logits is not None:
                parts.append(prompt_logprobs(logits, token_ids[rows], asked.num_logprobs))
        return join_logprobs(parts) if parts else None

    def _reply(
        self,
        step: int,
        request_ids: list[str],
        sampled: SampledTokens,
        of_prompts: dict[str, Logprobs],
    ) -> ModelRunnerOutput | None:
        if self._sampler is None:
            return None
        return ModelRunnerOutput(
            step=step,
            request_ids=request_ids,
            sampled_token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=of_prompts,
        )


_NOTHING_SAMPLED = SampledTokens(np.zeros(0, np.uint32))
