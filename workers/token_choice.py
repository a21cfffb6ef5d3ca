"""From logits to token ids, without sorting the vocabulary or drawing noise for all of it. Pure.

Used by `sampler` and `logprobs`. On a vocabulary of 262144 tokens either costs more than a small
model's forward pass. So a row is cut into groups of 128 tokens:

    logits   |..............|..............|..............| … |.....|     the last may be shorter
    maxima          7.1            9.3            2.0           4.4

The best token lies in the group with the best maximum, and the best K tokens lie in the K groups
with the best maxima. What is left to look at is small.

A draw among many tokens is three draws among few, each with a number of its own: one of the ranges
of 64 groups, one of its groups, one of that one's tokens. One number over 200,000 tokens would do,
but it lies so near to some token's edge that the last bits of the logits, which depend on the size
of a batch, change one draw in some hundred. Three numbers make that 24 to 46 times as rare.

Every result depends on its own row only, bit for bit: sums run over the 128 values of a group, the
64 of a range, or in order over a row, never at once over a whole row, which torch splits by the
number of threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32] | NDArray[np.float64]
Ints = NDArray[np.int64]

GROUP = 128

RANGE = 64
"""Groups that are drawn as one, at first."""

NUM_NUMBERS = 3
"""Of noise, for a draw: of a range, of a group, of a token."""

LEVELS = (64, 1024)
"""How many of the best tokens are looked at for min-p, top-k and top-p, before a row is sorted."""

CHUNK_BYTES = 4 << 20
"""Rows are copied in chunks of this size: they stay in the cache, and memory stays bounded."""

_ROUNDED_UP = 1 + 1e-9
"""Sums of weights differ by less than this, in whatever order they were added."""

_FARTHEST = 745.0
"""exp(-745) is the least positive float64: a token farther from the best has no weight."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How each of some rows is to be drawn, `[n]` each. The cuts are made in this order.

    On the host: what there is to do depends on them.
    """

    temperature: Floats
    """float64, above 0."""
    min_p: Floats
    """float64: tokens stay that are at least so likely, where the best token is 1. 0 keeps all."""
    top_k: Ints
    """int64: the best so many tokens stay, among equals those of lower id. The size of the
    vocabulary keeps all."""
    top_p: Floats
    """float64: of what min-p and top-k leave, those tokens stay whose betters together hold less
    than this share. 1 keeps all."""

    def of(self, part: Ints) -> "Cuts":
        return Cuts(self.temperature[part], self.min_p[part], self.top_k[part], self.top_p[part])


@dataclass(frozen=True, slots=True)
class Depth:
    """How far down some rows have to be looked at, `[n]` each: the first that is reached ends it.
    Infinity, or the largest integer, never is."""

    weight: Floats
    """float64: of the best tokens together, where the best one weighs 1."""
    count: Ints
    """int64: of tokens."""
    distance: Floats
    """float64: from the best logit, in units of the temperature."""


class RowScans(Protocol):
    """Passes over whole rows, which compiled code does a few times as fast."""

    def group_weights(
        self, logits: Tensor, maxima: Tensor, rows: Ints, temperature: Floats
    ) -> Tensor:
        """As the function of this name."""

    def tokens_above(
        self, logits: Tensor, maxima: Tensor, rows: Ints, temperature: Floats, depth: Depth
    ) -> list[tuple[NDArray[np.float32], Ints] | None]:
        """Return for each row the logits and ids of all tokens down to where it has to be looked
        at, or somewhat farther: the best first, and the lowest id first among equals. None where
        that is too far."""


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


def group_sums(values: Tensor) -> Tensor:
    """Return the sum of each group, `[n, num_groups]` float64 for `[n, vocab]` float32."""
    num_rows, vocab_size = values.shape
    num_whole, rest = divmod(vocab_size, GROUP)
    # 128 floats add up well in float32. The groups' sums do not: the error of thousands of them
    # is as large as a token's weight, and draws would hit its neighbours.
    sums = values.new_empty(num_rows, num_whole + (rest > 0), dtype=torch.float64)
    if num_whole:
        groups = torch.unflatten(values[:, : num_whole * GROUP], -1, (num_whole, GROUP))
        sums[:, :num_whole] = groups.sum(-1)
    if rest:
        sums[:, num_whole] = values[:, num_whole * GROUP :].sum(-1)
    return sums


def group_weights(logits: Tensor, maxima: Tensor, rows: Ints, temperature: Floats) -> Tensor:
    """Return the sum of `exp((logit - best) / temperature)` over each group, `[len(rows),
    num_groups]` float64. Tokens that are too far from the best may weigh nothing.

    Args:
        logits: `[n, vocab]` float32, contiguous.
        maxima: `group_maxima` of them.
        rows: `[len(rows)]` int64: which rows.
        temperature: of each of these.
    """
    size = chunk_rows(logits.shape[1])
    parts = []
    for first in range(0, len(rows), size):
        where = _on_device(rows[first : first + size], logits)
        scaled = logits.index_select(0, where)
        scaled.sub_(maxima.index_select(0, where).amax(-1, keepdim=True))
        divisor = _on_device(temperature[first : first + size], logits).to(scaled.dtype)
        parts.append(group_sums(scaled.div_(divisor.unsqueeze(1)).exp_()))
    return torch.cat(parts)


def in_order_sum(sums: Tensor) -> Tensor:
    """Return the sum of each row, `[n]`, added from left to right."""
    return sums.cumsum(-1)[:, -1]


def chunk_rows(vocab_size: int) -> int:
    """How many rows of logits fit `CHUNK_BYTES`; at least one."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


def argmax(logits: Tensor, maxima: Tensor) -> Tensor:
    """Return the best token of each row, `[n]`; the lowest id among equals."""
    token_ids = _members(maxima.argmax(-1), logits.shape[1])
    return _take(token_ids, logits.gather(1, token_ids).argmax(-1))


def candidates(logits: Tensor, maxima: Tensor, rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the best `size` tokens of some rows: logits and token ids, `[len(rows), size]`.

    Best first, and the lowest id first among equals. Which ones of the tokens that equal the last
    candidate are there is left open; so a caller that needs to know asks for more.
    """
    vocab_size = logits.shape[1]
    if size >= vocab_size:
        return _sort(logits.index_select(0, rows))
    if maxima.shape[1] <= 4 * size:
        values, token_ids = logits.index_select(0, rows).topk(size, -1)
    else:
        groups = maxima[rows].topk(size, -1, sorted=False).indices
        members = _members(groups, vocab_size)
        nearby = logits.take(members + (rows * vocab_size).view(-1, 1, 1))
        nearby = nearby.masked_fill_(_is_repeat(groups, vocab_size), -torch.inf).flatten(1)
        values, places = nearby.topk(size, -1)
        token_ids = members.flatten(1).gather(1, places)
    token_ids, order = torch.sort(token_ids, dim=-1)
    values, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _sort(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return all tokens of each row of `[n, vocab]`, as `candidates` does."""
    if logits.device.type != "cpu":
        values, token_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, token_ids
    # numpy sorts integers several times faster than torch floats with their places. Bits of floats
    # order like integers, negative ones backwards; the place below breaks ties.
    #     63                      32 31             0
    #     | ~(bits of the logit)    | token id      |
    bits = (logits + 0.0).numpy().view(np.int32)  # and -0.0 equals 0.0
    rising = np.where(bits < 0, ~bits, bits ^ np.int32(-(2**31))).view(np.uint32)
    keys = (~rising).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(logits.shape[1], dtype=np.uint64)
    keys.sort(axis=-1)
    token_ids = torch.from_numpy((keys & np.uint64(2**32 - 1)).astype(np.int64))
    return logits.gather(1, token_ids), token_ids


def choose(
    logits: Tensor,
    maxima: Tensor,
    rows: Ints,
    cuts: Cuts,
    uniform: Floats,
    scans: RowScans | None = None,
) -> Ints:
    """Draw one token for each of some rows, `[len(rows)]`, on the host.

    Args:
        logits: `[n, vocab]` float32, contiguous.
        maxima: `group_maxima` of them.
        rows: which rows.
        cuts: temperature and limits, one for each of `rows`.
        uniform: the noise, between 0 and 1, `[len(rows), NUM_NUMBERS]`.
        scans: None leaves them to torch.
    """
    vocab_size = logits.shape[1]
    weigh = group_weights if scans is None else scans.group_weights
    is_limited = (cuts.min_p > 0) | (cuts.top_k < vocab_size)
    is_cut = is_limited | (cuts.top_p < 1)
    tokens = np.zeros(len(rows), np.int64)
    if (part := (~is_cut).nonzero()[0]).size:
        weights = weigh(logits, maxima, rows[part], cuts.temperature[part])
        drawn = _draw(logits, maxima, weights, rows[part], cuts.temperature[part], uniform[part])
        tokens[part] = drawn.cpu().numpy()
    # Top-p of a row without other limits is a share of the whole vocabulary's weight.
    totals = np.full(len(rows), np.nan)
    if (part := (is_cut & ~is_limited).nonzero()[0]).size:
        weights = weigh(logits, maxima, rows[part], cuts.temperature[part])
        totals[part] = in_order_sum(weights).cpu().numpy()
    is_pending = is_cut
    looks = _looks(logits, maxima, rows, cuts, totals, is_pending, scans)
    for part, values, token_ids in looks:
        found = _draw_cut(values, token_ids, cuts.of(part), totals[part], uniform[part])
        tokens[part], is_certain = found
        is_pending[part] = ~is_certain
    return tokens


def _looks(
    logits: Tensor,
    maxima: Tensor,
    rows: Ints,
    cuts: Cuts,
    totals: Floats,
    is_pending: NDArray[np.bool_],
    scans: RowScans | None,
) -> Iterator[tuple[Ints, Floats, Ints]]:
    """Yield the best tokens of rows that are pending, more and more of them: which rows, and their
    logits and token ids, best first. After the last look no row is pending."""
    vocab_size = logits.shape[1]
    fits_none = cuts.top_k >= vocab_size
    # With scans, the second look is at what a cut needs.
    levels = LEVELS if scans is None else LEVELS[:1]
    for size in (level for level in levels if level < vocab_size):
        for part in _chunks(is_pending & (fits_none | (cuts.top_k < size)), vocab_size):
            found = candidates(logits, maxima, _on_device(rows[part], logits), size)
            yield part, found[0].cpu().numpy(), found[1].cpu().numpy()
    if scans is not None and is_pending.any():
        yield from _tokens_above_cuts(logits, maxima, rows, cuts, totals, is_pending, scans)
    for part in _chunks(is_pending, vocab_size):
        values, token_ids = _sort(logits.index_select(0, _on_device(rows[part], logits)))
        yield part, values.cpu().numpy(), token_ids.cpu().numpy()


def _tokens_above_cuts(
    logits: Tensor,
    maxima: Tensor,
    rows: Ints,
    cuts: Cuts,
    totals: Floats,
    is_pending: NDArray[np.bool_],
    scans: RowScans,
) -> Iterator[tuple[Ints, Floats, Ints]]:
    """As `_looks`: all tokens that the cuts of a row may leave, row by row."""
    pending = is_pending.nonzero()[0]
    top_k, min_p = cuts.top_k[pending], cuts.min_p[pending]
    shares = cuts.top_p[pending] * totals[pending] * _ROUNDED_UP
    with np.errstate(divide="ignore"):
        depth = Depth(
            weight=np.where(np.isnan(shares), np.inf, shares),
            count=np.where(top_k < logits.shape[1], top_k, np.iinfo(np.int64).max),
            distance=-np.log(min_p),
        )
    found = scans.tokens_above(logits, maxima, rows[pending], cuts.temperature[pending], depth)
    for index, tokens in zip(pending, found, strict=True):
        if tokens is not None:
            # The one after the last is as bad as can be: no other token is worth a look.
            values = np.append(tokens[0], np.float32(-np.inf))
            yield np.array([index]), values[None], np.append(tokens[1], 0)[None]


def _draw_cut(
    values: Floats, token_ids: Ints, cuts: Cuts, totals: Floats, uniform: Floats
) -> tuple[Ints, NDArray[np.bool_]]:
    """Cut candidates, and draw one of what stays: token ids, `[n]`; also whether each row is
    certain: no token that is not a candidate could have stayed.

    Args:
        values: `[n, size]` logits, best first.
        token_ids: `[n, size]`, whose they are.
        cuts: of these rows.
        totals: `[n]`, what top-p is a share of; NaN where that is all that the other cuts leave.
        uniform: `[n, NUM_NUMBERS]`.
    """
    weights, cumulative, num_kept, is_certain = _cut(values, cuts, totals)
    every = np.arange(len(values))
    kept = cumulative[every, num_kept - 1]
    target = np.minimum(uniform[:, 0] * kept, np.nextafter(kept, 0.0))
    places = np.minimum((cumulative <= target[:, None]).sum(-1), num_kept - 1)
    drawn = token_ids[every, places]
    for row in (num_kept > LEVELS[0]).nonzero()[0]:
        stays = slice(num_kept[row])
        drawn[row] = _draw_kept(token_ids[row, stays], weights[row, stays], uniform[row])
    return drawn, is_certain


def _cut(
    values: Floats, cuts: Cuts, totals: Floats
) -> tuple[Floats, Floats, Ints, NDArray[np.bool_]]:
    """Return the candidates' weights and the sums of these from the best on, `[n, size]`; how many
    stay, and whether that is certain, `[n]`. Arguments as of `_draw_cut`."""
    # All is sorted, so a cut is a count.     distance 0 ... 745 | weight 1 ... 5e-324
    every = np.arange(len(values))
    with np.errstate(divide="ignore", invalid="ignore"):  # no min-p; a row that is broken
        distances = (values[:, :1] - values.astype(np.float64)) / cuts.temperature[:, None]
        farthest = np.minimum(-np.log(cuts.min_p), _FARTHEST)
    weights = np.exp(-distances)
    cumulative = weights.cumsum(-1)
    num_left = np.minimum((distances <= farthest[:, None]).sum(-1), cuts.top_k)
    num_left = np.maximum(num_left, 1)
    has_total = ~np.isnan(totals)
    limits = cuts.top_p * np.where(has_total, totals, cumulative[every, num_left - 1])
    num_kept = np.minimum(1 + (cumulative < limits[:, None]).sum(-1), num_left)
    num_kept = np.where(cuts.top_p < 1, num_kept, num_left)
    # A token elsewhere is at most as good as the last candidate. So what stays is certain if all
    # of it is better than that.
    decisive = np.where(has_total, num_kept, num_left)
    is_certain = values[every, decisive - 1] > values[:, -1]
    return weights, cumulative, num_kept, is_certain


def _draw_kept(token_ids: Ints, weights: Floats, uniform: Floats) -> int:
    """Draw one of many tokens, `[n]` in any order: a range of groups, a group, a token."""
    for size, number in zip((GROUP * RANGE, GROUP, 1), uniform, strict=True):
        parts = token_ids // size
        parts -= parts.min()
        cumulative = np.bincount(parts, weights).cumsum()
        target = min(number * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
        part = min((cumulative <= target).sum(), len(cumulative) - 1)
        token_ids, weights = token_ids[parts == part], weights[parts == part]
    return int(token_ids[0])


def _draw(
    logits: Tensor,
    maxima: Tensor,
    weights: Tensor,
    rows: Ints,
    temperature: Floats,
    uniform: Floats,
) -> Tensor:
    """Draw one token of each of some rows, `[len(rows)]`: a range of groups by its weight, one of
    its groups, and one of that one's tokens."""
    vocab_size = logits.shape[1]
    of_range, of_group, of_token = _on_device(uniform, logits).unbind(-1)
    short = -weights.shape[1] % RANGE
    ranges = torch.unflatten(torch.nn.functional.pad(weights, (0, short)), -1, (-1, RANGE))
    drawn = _invert(ranges.sum(-1), of_range)
    inside = ranges[torch.arange(len(drawn), device=drawn.device), drawn]
    groups = drawn * RANGE + _invert(inside, of_group)
    groups.clamp_(max=weights.shape[1] - 1)
    token_ids, where = _members(groups, vocab_size), _on_device(rows, logits)
    inside = logits.take(token_ids + (where * vocab_size).unsqueeze(1)).double()
    inside -= _take(maxima.index_select(0, where), groups).unsqueeze(1)
    inside.div_(_on_device(temperature, logits).unsqueeze(1)).exp_()
    inside.masked_fill_(_is_repeat(groups, vocab_size), 0.0)
    return _take(token_ids, _invert(inside, of_token))


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the place where each row's cumulative sum passes `uniform` of its total, `[n]`."""
    cumulative = weights.cumsum(-1)
    totals = cumulative[:, -1]
    # Below the total also after rounding: what lies beyond it has no weight.
    target = torch.minimum(uniform * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    places = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return places.clamp_(max=weights.shape[1] - 1)  # a row with NaN may have no such place


def _members(groups: Tensor, vocab_size: int) -> Tensor:
    """Return the token ids of groups, `[…, 128]`. A shorter last group repeats its last token."""
    return _unclamped_members(groups).clamp_(max=vocab_size - 1)


def _is_repeat(groups: Tensor, vocab_size: int) -> Tensor:
    """Return which of the `_members` are repeats, `[…, 128]`."""
    return _unclamped_members(groups) >= vocab_size


def _unclamped_members(groups: Tensor) -> Tensor:
    return groups.unsqueeze(-1) * GROUP + torch.arange(GROUP, device=groups.device)


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Return `values[i, places[i]]` of each row, `[n]`."""
    return values.gather(1, places.unsqueeze(1)).squeeze(1)


def _chunks(mask: NDArray[np.bool_], vocab_size: int) -> Iterator[Ints]:
    """Yield the indices of the true elements of `[n]`, few enough for their logits to be copied."""
    indices, size = mask.nonzero()[0], chunk_rows(vocab_size)
    for first in range(0, len(indices), size):
        yield indices[first : first + size]


def _on_device(values: Floats | Ints, logits: Tensor) -> Tensor:
    return torch.from_numpy(values).to(logits.device, non_blocking=True)
