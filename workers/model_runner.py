"""One step on one rank: prepare the inputs, run the model, sample.

Every rank of an engine gets the same plans and keeps the same rows, so no rank asks another which
tokens came out: the engine core sends what it accepted with the next plan. Only the rank that
replies has a sampler. Where one rank does all, the next plan may already be there when a step ends,
and the rank goes on with the tokens that it has sampled.

A step that awaits masks is run in two calls: `execute` keeps its logits, `sample` makes tokens of
them. In between comes no other step.
"""

import itertools
from dataclasses import dataclass, field
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
    TokenMasks,
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
        self._unsampled: _Unsampled | None = None

    @property
    def num_requests(self) -> int:
        return len(self._batch)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step. Returns the reply, on the rank that replies, unless it awaits masks."""
        assert self._unsampled is None, "the last step still awaits its masks"
        self._update_sampler(plan, self._batch.update(plan))
        unsampled = self._run(plan)
        if plan.awaits_masks:
            self._unsampled = unsampled
            return None
        return self._complete(unsampled)

    @torch.inference_mode()
    def sample(self, masks: TokenMasks) -> ModelRunnerOutput | None:
        """Complete the step that awaits `masks`. Returns the reply, on the rank that replies."""
        unsampled, self._unsampled = self._unsampled, None
        if unsampled is None or unsampled.number != masks.step:
            raise RuntimeError(f"masks of step {masks.step} came, which nobody awaits")
        return self._complete(unsampled, masks)

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

    def _run(self, plan: SchedulerOutput) -> "_Unsampled":
        """Run a step as far as its logits."""
        if self._batch.has_only_ended(plan):  # or there is nothing in it at all
            return _Unsampled(plan.step, list(plan.num_scheduled_tokens))
        step = self._batch.prepare(plan)
        states = self._model.forward(step, self._batch)
        unsampled = _Unsampled(plan.step, step.sampling_ids, step)
        if states is not None:
            unsampled.of_prompts = self._prompt_logprobs(step, states)
            unsampled.logits = self._logits(step, states)
        return unsampled

    def _complete(
        self, unsampled: "_Unsampled", masks: TokenMasks | None = None
    ) -> ModelRunnerOutput | None:
        """Sample, and return the reply."""
        if self._sampler is None:
            return None
        sampled = self._sample(self._sampler, unsampled, masks)
        return ModelRunnerOutput(
            step=unsampled.number,
            request_ids=unsampled.request_ids,
            sampled_token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=unsampled.of_prompts,
        )

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

    def _logits(self, step: Step, states: Tensor) -> Tensor | None:
        """Return the logits of the requests whose known tokens end in this step."""
        if not step.sampling_ids:
            return None
        if len(step.sampling_ids) < step.num_tokens:  # else a decode: all of them, in order
            states = states[step.sampling_rows]
        return self._model.logits(states)

    def _sample(
        self, sampler: Sampler, unsampled: "_Unsampled", masks: TokenMasks | None
    ) -> SampledTokens:
        """Return the next token of each request that samples one in this step."""
        if unsampled.step is None:
            return SampledTokens(np.full(len(unsampled.request_ids), NO_TOKEN, np.uint32))
        if unsampled.logits is None:
            return SampledTokens(np.zeros(0, np.uint32))
        sampled = sampler.sample(unsampled.logits, unsampled.request_ids, masks)
        self._batch.keep_sampled(unsampled.step, sampled.token_ids)
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


@dataclass(slots=True)
class _Unsampled:
    """A step on its way from `execute` to its reply."""

    number: int
    request_ids: list[str]
    """That sample a token; in a step that was left out, all that it had."""
    step: Step | None = None
    """None: it has nothing to compute, no requests or none that goes on, and was left out."""
    logits: Tensor | None = None
    """`[len(request_ids), vocab_size]`; None where another rank has them, or nobody samples."""
    of_prompts: dict[str, Logprobs] = field(default_factory=dict)
