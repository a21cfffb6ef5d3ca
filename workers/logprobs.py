"""Log probabilities of tokens under the model itself: before any edit, temperature or cut.

Used by `sampler` for sampled tokens and by `model_runner` for prompt tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.limits import MAX_LOGPROBS
from engine.wire import Logprobs
from workers import token_choice


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of one token per row and of the best tokens of that row, as tensors."""

    token_ids: Tensor
    """`[n, 1 + k]`: the token, then the best ones in falling order."""
    logprobs: Tensor
    """`[n, 1 + k]` float32."""
    ranks: Tensor
    """`[n]`: 1 + the number of tokens that are more likely."""
    best: Tensor
    """`[n, 1]` float32: the largest logit."""
    log_totals: Tensor
    """`[n, 1]` float64: log of the sum of all tokens' weights, where the best token weighs 1."""

    def of(self, rows: slice, k: int) -> Logprobs:
        """What travels: some of the rows, with the best `k` tokens."""
        return Logprobs(
            token_ids=self.token_ids[rows, : 1 + k].cpu().numpy().astype(np.uint32),
            logprobs=np.ascontiguousarray(self.logprobs[rows, : 1 + k].cpu().numpy()),
            ranks=self.ranks[rows].cpu().numpy().astype(np.uint32),
        )

    def of_listed(self, row: int, logits: Tensor, token_ids: Tensor) -> Logprobs:
        """What travels of one row where certain tokens are asked for: its own token, then those.

        Args:
            row: its place in here.
            logits: `[vocab]` float32, from which the row was made.
            token_ids: `[k]` int64.
        """
        listed = (logits[token_ids] - self.best[row]).double() - self.log_totals[row]
        return Logprobs(
            token_ids=torch.cat([self.token_ids[row, :1], token_ids])
            .view(1, -1)
            .cpu()
            .numpy()
            .astype(np.uint32),
            logprobs=torch.cat([self.logprobs[row, :1], listed.float()]).view(1, -1).cpu().numpy(),
            ranks=self.ranks[row : row + 1].cpu().numpy().astype(np.uint32),
        )


def prompt_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Logprobs:
    """Return the log probabilities of prompt tokens.

    Args:
        logits: `[n, vocab]` float32, each row computed at the token before.
        token_ids: `[n]`, the tokens that followed.
        k: best alternatives wanted.
    """
    rows = torch.arange(len(logits), device=logits.device)
    return row_logprobs(logits, rows, token_ids.to(logits.device, torch.int64)).of(slice(None), k)


def row_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor) -> RowLogprobs:
    """Return the log probabilities of `token_ids`, one in each of `rows` of the logits, and of the
    `MAX_LOGPROBS` best tokens there."""
    num_rows = token_choice.chunk_rows(logits.shape[1])
    parts = [
        _chunk_logprobs(logits.index_select(0, chunk), ids)
        for chunk, ids in zip(
            torch.split(rows, num_rows), torch.split(token_ids, num_rows), strict=True
        )
    ]
    return RowLogprobs(
        torch.cat([p.token_ids for p in parts]),
        torch.cat([p.logprobs for p in parts]),
        torch.cat([p.ranks for p in parts]),
        torch.cat([p.best for p in parts]),
        torch.cat([p.log_totals for p in parts]),
    )


def _chunk_logprobs(logits: Tensor, token_ids: Tensor) -> RowLogprobs:
    rows = torch.arange(len(logits), device=logits.device)
    maxima = token_choice.group_maxima(logits)
    values, best_ids = token_choice.candidates(logits, maxima, rows, token_choice.LEVELS[0])
    best = values[:, :1]
    own = logits.gather(1, token_ids.unsqueeze(1))
    ranks = 1 + _num_better(logits, own, values)
    sums = token_choice.group_sums(logits.sub(best).exp_())
    log_total = token_choice.in_order_sum(sums).log().unsqueeze(1)
    shown = torch.cat([own, values[:, :MAX_LOGPROBS]], 1)
    return RowLogprobs(
        torch.cat([token_ids.unsqueeze(1), best_ids[:, :MAX_LOGPROBS]], 1),
        ((shown - best).double() - log_total).float(),
        ranks,
        best,
        log_total,
    )


def _num_better(logits: Tensor, own: Tensor, candidates: Tensor) -> Tensor:
    """Return how many logits of each row are above its `own`, `[n]`."""
    num_better = (candidates > own).sum(-1)
    # Most tokens are among the candidates. For the others the row is counted through, in float32,
    # which is exact for groups of 128 and several times faster than a sum of booleans.
    beyond = (own < candidates[:, -1:]).squeeze(1).nonzero().flatten()
    if len(beyond):
        is_better = (logits[beyond] > own[beyond]).float()
        counts = token_choice.in_order_sum(token_choice.group_sums(is_better))
        num_better[beyond] = counts.to(num_better.dtype)
    return num_better
