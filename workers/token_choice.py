"""From logits to token ids, without noise or order over the vocabulary. Pure functions of tensors.

Used by `sampler` and `logprobs`. A vocabulary of 262144 makes sorting it, or drawing noise for it,
dearer than a small model's forward pass. So a row is cut into groups of 128 tokens:

    logits   |..............|..............|..............| … |.....|     the last may be shorter
    maxima          7.1            9.3            2.0           4.4

The best token lies in the group with the best maximum, and the best K tokens lie in the K groups
with the best maxima. What is left is small.

Every result depends on its own row only, bit for bit: reductions run over a group's 128 values or
over one row in order, never over a whole row at once, which torch splits by the number of threads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

GROUP = 128
LEVELS = (64, 1024)
"""Candidates that are tried for top-k, top-p and min-p, before a row is sorted whole."""

CHUNK_BYTES = 16 << 20
"""Rows are copied in chunks of this size: they stay in the cache, and memory stays bounded."""


def group_maxima(logits: Tensor) -> Tensor:
    """Return the largest logit of each group, `[n, num_groups]` for `[n, vocab]`."""
    num_rows, vocab_size = logits.shape
    num_whole, rest = divmod(vocab_size, GROUP)
    maxima = logits.new_empty(num_rows, num_whole + (rest > 0))
    if num_whole:
        groups = torch.unflatten(logits[:, : num_whole * GROUP], -1, (num_whole, GROUP))
        torch.amax(groups, -1, out=maxima[:, :num_whole])
    if rest:
        torch.amax(logits[:, num_whole * GROUP :], -1, out=maxima[:, num_whole])
    return maxima


def argmax(logits: Tensor, maxima: Tensor) -> Tensor:
    """Return the best token of each row, `[n]`; the lowest id among equals."""
    groups = maxima.argmax(-1)
    token_ids = _members(groups, logits.shape[1])
    return token_ids.gather(1, logits.gather(1, token_ids).argmax(-1, keepdim=True)).squeeze(1)


def candidates(logits: Tensor, maxima: Tensor, rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the best `size` tokens of the given rows: logits and token ids, `[len(rows), size]`.

    Best first, and among equals the lowest id first. Which of the tokens that equal the last
    candidate are among them is left open.
    """
    vocab_size = logits.shape[1]
    if size >= vocab_size:
        values, token_ids = logits[rows].sort(dim=-1, descending=True, stable=True)
        return values, token_ids
    if maxima.shape[1] <= 4 * size:
        values, token_ids = logits[rows].topk(size, -1)
    else:
        groups = maxima[rows].topk(size, -1, sorted=False).indices
        members = _members(groups, vocab_size).flatten(1)
        nearby = logits.flatten()[members + (rows * vocab_size).unsqueeze(1)]
        # The last group repeats the last token where it is short of 128: only one may count.
        nearby.masked_fill_(_is_repeated(groups, vocab_size).flatten(1), -torch.inf)
        values, places = nearby.topk(size, -1)
        token_ids = members.gather(1, places)
    token_ids, order = token_ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def chunks(rows: Tensor, vocab_size: int) -> Iterator[Tensor]:
    """Split row indices so that the rows' logits fit `CHUNK_BYTES`."""
    yield from torch.split(rows, max(1, CHUNK_BYTES // (4 * vocab_size)))


def weights(logits: Tensor, rows: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Return `exp((logit - best) / temperature)` of the rows, `[len(rows), vocab]`."""
    scaled = logits[rows]
    scaled.sub_(best.unsqueeze(1)).div_(temperature.to(logits.dtype).unsqueeze(1))
    return scaled.exp_()


def group_sums(values: Tensor) -> Tensor:
    """Return each group's sum, `[n, num_groups]` float64."""
    num_rows, vocab_size = values.shape
    num_whole, rest = divmod(vocab_size, GROUP)
    # A sum of 128 floats is exact to a few parts in ten million; the sums of these are not, in
    # float32, and would shift the tokens at the far end of the distribution.
    sums = values.new_empty(num_rows, num_whole + (rest > 0), dtype=torch.float64)
    if num_whole:
        groups = torch.unflatten(values[:, : num_whole * GROUP], -1, (num_whole, GROUP))
        sums[:, :num_whole] = groups.sum(-1)
    if rest:
        sums[:, num_whole] = values[:, num_whole * GROUP :].sum(-1)
    return sums


def in_order_sum(sums: Tensor) -> Tensor:
    """Return the sum of each row of `[n, m]` float64, in an order that is the row's own, `[n]`."""
    return sums.cumsum(-1)[:, -1]


def draw(row_weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token of each row by its weight, `[n]`, in the order of the ids.

    Args:
        row_weights: `[n, vocab]`, not normalised.
        uniform: `[n]` float64, between 0 and 1.
    """
    vocab_size = row_weights.shape[1]
    groups, share = _pick(group_sums(row_weights).cumsum(-1), uniform)
    token_ids = _members(groups, vocab_size)
    members = row_weights.gather(1, token_ids).double()
    members.masked_fill_(_is_repeated(groups, vocab_size), 0.0)
    place, _ = _pick(members.cumsum(-1), share)
    return token_ids.gather(1, place.unsqueeze(1)).squeeze(1)


def _pick(cumulative: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Invert a cumulative sum: the place that holds `uniform` of the total, and how far into it."""
    total = cumulative[:, -1]
    # Rounding may lift the product to the total itself, beyond the last place with any weight.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, target.unsqueeze(1), right=True)
    place.clamp_(max=cumulative.shape[1] - 1)  # a row of NaN finds no place
    upper = cumulative.gather(1, place).squeeze(1)
    lower = cumulative.gather(1, (place - 1).clamp(min=0)).squeeze(1)
    lower = torch.where(place.squeeze(1) > 0, lower, torch.zeros_like(lower))
    return place.squeeze(1), (target - lower) / (upper - lower)


def _members(groups: Tensor, vocab_size: int) -> Tensor:
    """Return the token ids of groups, `[…, 128]`. The last group repeats its last token."""
    offsets = torch.arange(GROUP, device=groups.device)
    return (groups.unsqueeze(-1) * GROUP + offsets).clamp_(max=vocab_size - 1)


def _is_repeated(groups: Tensor, vocab_size: int) -> Tensor:
    offsets = torch.arange(GROUP, device=groups.device)
    return groups.unsqueeze(-1) * GROUP + offsets >= vocab_size
