"""Logits to token ids, with what each request wants of them.

Used by `model_runner` on the rank that replies. Holds per request what must outlive a step; the
arithmetic on rows is in `token_choice`, the noise in `noise`. A row's result does not depend on
what else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling_params import SamplingParams
from engine.wire import Logprobs
from workers import noise, token_choice

TokenIds = Tensor | NDArray[np.uint32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's tokens, in the order of the rows."""

    token_ids: NDArray[np.uint32]
    """`[n]`."""
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    """By request id, for those that asked; one token each."""


@dataclass(slots=True)
class _Request:
    params: SamplingParams
    key: int
    num_output: int


class Sampler:
    """Samples one token for each row of logits.

    Args:
        vocab_size: columns of the logits.
        max_num_seqs: requests that may be known at once, usually.
        device: where the logits are.
        default_seed: start of the noise of requests without a seed. Engines that serve together
            should have different ones.
    """

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: torch.device, default_seed: int
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._default_key = noise.key_of_seed(default_seed)
        self._num_unseeded = 0
        self._requests: dict[str, _Request] = {}

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: TokenIds,
        output_token_ids: TokenIds,
    ) -> None:
        """Make a request known. `output_token_ids` are those it has already: after preemption, or
        when it began elsewhere."""
        if params.seed is None:
            key = noise.nth_key(self._default_key, self._num_unseeded)
            self._num_unseeded += 1
        else:
            key = noise.key_of_seed(params.seed)
        self._requests[request_id] = _Request(params, key, len(output_token_ids))

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Count tokens that the core has accepted as the request's output."""
        self._requests[request_id].num_output += len(token_ids)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        del self._requests[request_id]

    def sample(self, logits: Tensor, request_ids: Sequence[str]) -> SampledTokens:
        """Return one token per row.

        Args:
            logits: `[len(request_ids), vocab_size]` float32, contiguous. Overwritten.
            request_ids: whose rows they are.
        """
        maxima = token_choice.group_maxima(logits)
        tokens = token_choice.argmax(logits, maxima)
        requests = [self._requests[request_id] for request_id in request_ids]
        random = [i for i, r in enumerate(requests) if not r.params.is_greedy]
        if random:
            chosen = [requests[i] for i in random]
            uniform = torch.from_numpy(
                noise.uniforms(
                    np.array([r.key for r in chosen], np.uint64),
                    np.array([r.num_output for r in chosen], np.int64),
                )
            ).to(self._device)
            temperature = torch.tensor([r.params.temperature for r in chosen], device=self._device)
            rows = torch.tensor(random, device=self._device)
            best = maxima.amax(-1)[rows]
            tokens[rows] = token_choice.draw(
                token_choice.weights(logits, rows, best, temperature), uniform
            )
        return SampledTokens(tokens.cpu().numpy().astype(np.uint32))
