"""Logits to token ids, with what each request wants of them.

Used by `model_runner` on the rank that replies. Holds per request what must outlive a step; what
rows are made of is elsewhere: `token_masks` (of structured output), `logit_edits` (bias, penalties,
bans), `token_choice` (best tokens, cuts, draws), `noise` (the uniforms of a row) and `logprobs`.

    logits -> masks -> edits -> best token ------------------------------------> greedy rows
                            \\-> temperature -> min-p -> top-k -> top-p -> draw -> random rows

A row's token depends on its logits and its request alone, not on what else is in the batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling_params import SamplingParams
from engine.step import TokenMasks
from engine.wire import Logprobs
from workers import logit_edits, noise, token_choice, token_masks
from workers.logit_edits import LogitEdits
from workers.logprobs import prompt_logprobs, row_logprobs
from workers.native import Kernels

__all__ = ["SampledTokens", "Sampler", "TokenIds", "prompt_logprobs"]

TokenIds = Tensor | NDArray[np.uint32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's tokens, in the order of the rows."""

    token_ids: NDArray[np.uint32]
    """`[n]`."""
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    """By request id, for those that asked; one token each."""


class Sampler:
    """Samples one token for each row of logits.

    Args:
        vocab_size: columns of the logits.
        max_num_seqs: requests that are known at once, at most.
        device: where the logits are.
        default_seed: start of the noise of requests without a seed. Engines that serve together
            should have different ones.
        kernels: that look for the best tokens and weigh groups; None leaves it to torch.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        device: torch.device,
        default_seed: int,
        kernels: Kernels | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._device = device
        self._default_key = noise.key_of_seed(default_seed)
        self._num_unseeded = 0
        self._table = _Table(max_num_seqs)
        # Only the requests that want such a thing are in these, so that the others cost nothing.
        self._edits: dict[str, LogitEdits] = {}
        self._random: set[str] = set()
        self._num_logprobs: dict[str, int] = {}
        self._listed: dict[str, Tensor] = {}
        """Whose log probabilities are asked for, `[k]` int64, where it is not the best tokens'."""

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: TokenIds,
        output_token_ids: TokenIds,
    ) -> None:
        """Make a request known. `output_token_ids` are those it has already: after preemption, or
        when it began elsewhere."""
        key = 0
        if not params.is_greedy:
            key = self._key(params.seed)
            self._random.add(request_id)
        self._table.add(request_id, params, key, len(output_token_ids), self._vocab_size)
        if params.logprobs is not None:
            self._num_logprobs[request_id] = params.logprobs
            if params.logprob_token_ids:
                self._listed[request_id] = self._tensor(list(params.logprob_token_ids))
        if LogitEdits.wanted_by(params):
            prompt, output = (
                np.asarray(ids, np.int64) for ids in (prompt_token_ids, output_token_ids)
            )
            self._edits[request_id] = LogitEdits(params, self._vocab_size, prompt, output)

    def append(self, request_ids: Sequence[str], token_ids: NDArray[np.int64]) -> None:
        """Count output tokens, one of each request; of one that comes again, in this order."""
        np.add.at(self._table.num_output, self._slots(request_ids), 1)
        if self._edits:
            for request_id, token_id in zip(request_ids, token_ids.tolist(), strict=True):
                if (edits := self._edits.get(request_id)) is not None:
                    edits.append(token_id)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._table.remove(request_id)
        self._random.discard(request_id)
        self._edits.pop(request_id, None)
        self._num_logprobs.pop(request_id, None)
        self._listed.pop(request_id, None)

    def sample(
        self, logits: Tensor, request_ids: Sequence[str], masks: TokenMasks | None = None
    ) -> SampledTokens:
        """Return one token per row.

        Args:
            logits: `[len(request_ids), vocab_size]` float32; rows may lie apart. Overwritten.
            request_ids: whose rows they are.
            masks: what some of them may sample, no matter what else they want.
        """
        masked = {} if masks is None else self._masked(request_ids, masks)
        edited = _rows_in(self._edits, request_ids)
        random = _rows_in(self._random, request_ids)
        reported = _rows_in(self._num_logprobs, request_ids)
        # Log probabilities are the model's own: rows that are about to change are kept for them.
        changing = {*edited, *masked}
        kept = [row for row in reported if row in changing]
        raw = logits[kept] if kept else None

        if masked:
            bits = np.stack(list(masked.values()))
            token_masks.apply(logits, list(masked), bits, self._kernels)
        if edited:
            pairs = [(row, self._edits[request_ids[row]]) for row in edited]
            logit_edits.apply(logits, pairs, masked)
        maxima, best = self._best_tokens(logits)
        tokens = best.cpu().numpy()
        if random:
            tokens[random] = self._draw(logits, maxima, random, request_ids)

        logprobs: dict[str, Logprobs] = {}
        if unchanged := [row for row in reported if row not in changing]:
            logprobs |= self._report(logits, unchanged, unchanged, tokens, request_ids)
        if raw is not None:
            logprobs |= self._report(raw, list(range(len(kept))), kept, tokens, request_ids)
        return SampledTokens(tokens.astype(np.uint32), logprobs)

    def _masked(self, request_ids: Sequence[str], masks: TokenMasks) -> dict[int, token_masks.Bits]:
        """Return the mask of each row that has one."""
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        return dict(zip(map(row_of.__getitem__, masks.request_ids), masks.bits, strict=True))

    def _best_tokens(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum of each group of tokens, and the best token of each row."""
        if self._kernels is not None:
            return self._kernels.best_tokens(logits)
        maxima = token_choice.group_maxima(logits)
        return maxima, token_choice.argmax(logits, maxima)

    def _draw(
        self, logits: Tensor, maxima: Tensor, rows: list[int], request_ids: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return a random token for each of the rows."""
        slots = self._slots([request_ids[row] for row in rows])
        keys, counters = self._table.key[slots], self._table.num_output[slots]
        uniform = noise.uniforms(keys, counters, token_choice.NUM_NUMBERS)
        cuts = token_choice.Cuts(
            temperature=self._table.temperature[slots],
            top_k=self._table.top_k[slots],
            top_p=self._table.top_p[slots],
            min_p=self._table.min_p[slots],
        )
        return token_choice.choose(logits, maxima, np.array(rows), cuts, uniform, self._kernels)

    def _report(
        self,
        logits: Tensor,
        logit_rows: list[int],
        rows: list[int],
        tokens: NDArray[np.int64],
        request_ids: Sequence[str],
    ) -> dict[str, Logprobs]:
        """Return the log probabilities of the tokens of `rows`, by request id. Their raw logits are
        in `logit_rows`, in the same order."""
        found = row_logprobs(logits, self._tensor(logit_rows), self._tensor(tokens[rows]))
        reported = {
            request_ids[row]: found.of(slice(i, i + 1), self._num_logprobs[request_ids[row]])
            for i, row in enumerate(rows)
        }
        if self._listed:
            for i, row in enumerate(rows):
                if (listed := self._listed.get(request_ids[row])) is not None:
                    reported[request_ids[row]] = found.of_listed(i, logits[logit_rows[i]], listed)
        return reported

    def _slots(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        slot_of = self._table.slots.__getitem__
        return np.fromiter(map(slot_of, request_ids), np.int64, len(request_ids))

    def _key(self, seed: int | None) -> int:
        if seed is not None:
            return noise.key_of_seed(seed)
        # Not from the request's id: a client that repeats one would get the same text again.
        self._num_unseeded += 1
        return noise.nth_key(self._default_key, self._num_unseeded)

    def _tensor(self, values: list[int] | NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(values).to(self._device, non_blocking=True)


class _Table:
    """What every request has, as columns, so that a step gathers arrays rather than objects."""

    def __init__(self, size: int) -> None:
        self.slots: dict[str, int] = {}
        self._free = list(range(size))
        self.key = np.zeros(size, np.uint64)
        self.num_output = np.zeros(size, np.int64)
        self.temperature = np.ones(size, np.float64)
        self.top_k = np.zeros(size, np.int64)
        self.top_p = np.ones(size, np.float64)
        self.min_p = np.zeros(size, np.float64)

    def add(
        self, request_id: str, params: SamplingParams, key: int, num_output: int, vocab_size: int
    ) -> None:
        assert request_id not in self.slots, f"{request_id} joined twice"
        slot = self.slots[request_id] = self._free.pop()
        self.key[slot] = key
        self.num_output[slot] = num_output
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p

    def remove(self, request_id: str) -> None:
        self._free.append(self.slots.pop(request_id))


def _rows_in(requests: Iterable[str], request_ids: Sequence[str]) -> list[int]:
    """Return the rows whose request is one of `requests`, a dict or set."""
    if not requests:
        return []
    return [row for row, request_id in enumerate(request_ids) if request_id in requests]
