"""The scripted model: a model without weights that says what its script says.

    raywire serve scripted

It runs in real workers over the real wires, with a real KV cache, batch and sampler; only the
logits come from a script instead of arithmetic. So it shows how a deployment behaves (processes,
streams, cancellation, failures) on any machine, and tests of everything but arithmetic use it.

What a script may say is in `workers/script.py`. The scripted token is far ahead of the others,
which get a little noise that depends on their ids alone: greedy output is the script, and
penalties, biases, temperature, log probabilities and seeds do to it what they would do to a real
model's.
"""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step import KVCacheSpec
from workers import kv_cache
from workers.input_batch import InputBatch, Step
from workers.parallel import Place
from workers.script import ScriptedConfig

IntArray = NDArray[np.int64]

LEAD = 12.0
"""Logit of the scripted token; the others have between 0 and 1."""


class ScriptedModel:
    """Implements `model_runner.Model`.

    Its cache holds the token ids themselves, and an echo is read back from there by block table: a
    wrong block, or one that was given away too early, is heard.
    """

    def __init__(self, config: ScriptedConfig, rank: int, place: Place) -> None:
        self.vocab_size = config.vocab_size
        self._script = config.script
        self._script_ids = np.array(config.script.token_ids, np.int64)
        self._end_token_id = config.end_token_id
        self._rank = rank
        self._place = place
        self._num_steps = 0
        self._noise = torch.rand(self.vocab_size, generator=torch.Generator().manual_seed(0))
        self._cache = np.zeros(0, np.int32)

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        self._cache = np.zeros(spec.num_blocks * spec.block_size, np.int32)

    def forward(self, step: Step, batch: InputBatch) -> Tensor | None:
        """Return `[num_tokens]` int64: the token that the script has next after each."""
        self._num_steps += 1
        self._fail_if_scripted()
        time.sleep(self._script.step_delay_s + self._script.token_delay_s * step.num_tokens)
        token_ids = batch.token_ids[step.token_rows_cpu, step.positions_cpu]
        self._cache[step.layout.slot_mapping.numpy()] = token_ids
        if not self._place.is_last_stage:
            return None
        return torch.from_numpy(self._next_token_ids(step, batch))

    def logits(self, states: Tensor) -> Tensor | None:
        if not self._place.is_output:
            return None
        return self._noise.repeat(len(states), 1).scatter_(1, states[:, None], LEAD)

    def _fail_if_scripted(self) -> None:
        script = self._script
        is_ours = (
            self._place.is_output
            if script.raise_on_rank is None
            else (script.raise_on_rank == self._rank)
        )
        if is_ours and script.raise_at_step == self._num_steps:
            raise RuntimeError(f"the script says to fail at step {self._num_steps}")

    def _next_token_ids(self, step: Step, batch: InputBatch) -> IntArray:
        rows, positions = step.token_rows_cpu, step.positions_cpu
        num_prompt = batch.num_prompt_tokens[rows]
        index = positions + 1 - num_prompt  # of the output token that comes next
        in_prompt = batch.token_ids[rows, np.minimum(positions + 1, num_prompt - 1)]
        scripted = self._output_tokens(step, np.maximum(index, 0), num_prompt)
        return np.where(index < 0, in_prompt, scripted).astype(np.int64)

    def _output_tokens(self, step: Step, index: IntArray, num_prompt: IntArray) -> IntArray:
        match self._script.kind:
            case "cycle":
                return self._script_ids[index % len(self._script_ids)]
            case "tokens":
                tokens = self._script_ids[np.minimum(index, len(self._script_ids) - 1)]
                return np.where(index < len(self._script_ids), tokens, self._end_token_id)
            case "echo":
                tokens = self._recall(step, np.minimum(index, num_prompt - 1))
                return np.where(index < num_prompt, tokens, self._end_token_id)

    def _recall(self, step: Step, positions: IntArray) -> IntArray:
        """Return what the cache holds at a position of each token's request."""
        layout = step.layout
        requests = np.repeat(np.arange(len(layout.seq_lens_cpu)), np.diff(layout.query_start_cpu))
        slots = kv_cache.slot_mapping(
            layout.block_table.numpy(), requests, positions, layout.block_size
        )
        tokens: IntArray = self._cache[slots].astype(np.int64)
        return tokens
