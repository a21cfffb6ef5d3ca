"""Attention on CPU, in PyTorch: requests that decode in batches, those that prefill one by one.

A decoding request has one query. Its heads that share a key head become the rows of one small
matrix, so that a batch is a single call of torch's fused attention over gathered pages:

    query  [n, H, D]     ->  [n, K, H/K, D]
    pages  block table   ->  [n, K, longest, D], the rest of the shorter ones masked

Batches are cut where the gathered pages would leave the processor's cache, and go by length, so
that little is masked. With a window only the pages that it touches are gathered.

A request's last page is gathered whole, and behind its last token it may hold what an earlier owner
left. No mask hides a NaN or an infinity: NaN + -inf and 0 · inf are NaN. So that rest of the page,
which belongs to the request and is not yet used, is cleared first.

A kernel of our own that reads pages in place belongs here; this is its fallback.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.attention import reference
from workers.attention.base import AttentionCall
from workers.forward_context import BatchLayout
from workers.kv_cache import LayerKV

GATHER_BYTES = 4 << 20
"""Keys that one batch of decodes may gather: measured, beyond some megabytes one request after the
other is faster than all at once."""


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    """Requests with one query each, attended to in one call."""

    tokens: Tensor
    """`[n]`, their queries in the flat batch."""
    block_ids: Tensor
    """`[n, num_blocks]`: pages to gather."""
    mask: Tensor
    """`[n, 1, 1, num_keys]` float, 0 or -inf: broadcast over key heads and rows."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One request with several queries."""

    tokens: slice
    block_ids: Tensor
    keys: slice
    """Which of the gathered tokens are keys."""
    mask: Tensor | None
    """`[num_queries, num_keys]` float, 0 or -inf; None where plain causal attention says the
    same."""


@dataclass(frozen=True, slots=True)
class _Work:
    decodes: list[_DecodeBatch]
    prefills: list[_Prefill]


class CpuAttention:
    """See `AttentionBackend`."""

    name = "cpu"
    block_size = 16
    can_be_captured = False

    def __init__(self) -> None:
        self._reference = reference.ReferenceAttention()
        self._work: dict[int | None, _Work] = {}

    def prepare(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._unused = _unused_slots(layout)
        # By window: a model's layers share one or two, and the first layer of each makes the plan.
        self._work.clear()
        self._reference.prepare(layout)

    def forward(self, call: AttentionCall, query_THD: Tensor, kv: LayerKV) -> Tensor:
        if call.softcap is not None or call.sinks is not None:
            return self._reference.forward(call, query_THD, kv)  # not in torch's fused attention
        work = self._work.get(call.window)
        if work is None:
            work = self._work[call.window] = _divide(self._layout, call.window, kv)
        for pages in kv:
            pages.flatten(0, 1).index_fill_(0, self._unused, 0)
        out_THD = torch.empty_like(query_THD)
        for batch in work.decodes:
            out_THD[batch.tokens] = _decode(batch, call.scale, query_THD[batch.tokens], kv)
        for prefill in work.prefills:
            out_THD[prefill.tokens] = _prefill(prefill, call.scale, query_THD[prefill.tokens], kv)
        return out_THD


def _decode(batch: _DecodeBatch, scale: float, query_NHD: Tensor, kv: LayerKV) -> Tensor:
    num_reqs, _, head_dim = query_NHD.shape
    num_kv_heads = kv.key.shape[2]
    query_NKGD = query_NHD.view(num_reqs, num_kv_heads, -1, head_dim)
    key_NKSD, value_NKSD = (
        _gather(pages, batch.block_ids).view(num_reqs, -1, num_kv_heads, head_dim).transpose(1, 2)
        for pages in kv
    )
    out_NKGD = scaled_dot_product_attention(
        query_NKGD, key_NKSD, value_NKSD, attn_mask=batch.mask, scale=scale
    )
    return out_NKGD.flatten(1, 2)


def _prefill(prefill: _Prefill, scale: float, query_THD: Tensor, kv: LayerKV) -> Tensor:
    key_SKD, value_SKD = (_gather(pages, prefill.block_ids)[prefill.keys] for pages in kv)
    out_1HTD = scaled_dot_product_attention(
        query_THD.transpose(0, 1)[None],
        key_SKD.transpose(0, 1)[None],
        value_SKD.transpose(0, 1)[None],
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out_1HTD[0].transpose(0, 1)


def _gather(pages: Tensor, block_ids: Tensor) -> Tensor:
    """Return `[num_tokens, K, D]`: what the pages hold, one after the other."""
    # index_select copies page by page; `pages[block_ids]` is several times slower.
    return pages.index_select(0, block_ids.flatten()).flatten(0, 1)


def _unused_slots(layout: BatchLayout) -> Tensor:
    """Return the slots behind the last token in the last page of each decoding request."""
    decoding = np.flatnonzero(np.diff(layout.query_start_cpu) == 1)
    last_block, last_offset = np.divmod(layout.seq_lens_cpu[decoding] - 1, layout.block_size)
    block_ids = layout.block_table.numpy()[decoding, last_block].astype(np.int64)
    offsets = np.arange(layout.block_size)
    slots = block_ids[:, None] * layout.block_size + offsets
    return torch.from_numpy(slots[offsets > last_offset[:, None]])


def _divide(layout: BatchLayout, window: int | None, kv: LayerKV) -> _Work:
    """Say how the step's requests are attended to by layers with this window."""
    query_lens = np.diff(layout.query_start_cpu)
    # Whole pages that no query of the request can see any more are not gathered.
    hidden = 0 if window is None else np.maximum(0, layout.seq_lens_cpu - query_lens + 1 - window)
    first_block = np.broadcast_to(hidden // layout.block_size, query_lens.shape)
    decoding = np.flatnonzero(query_lens == 1)
    prefilling = np.flatnonzero(query_lens > 1)
    return _Work(
        decodes=[
            _decode_batch(layout, requests, first_block[requests], window, kv.key.dtype)
            for requests in _batches(layout, decoding, first_block, kv)
        ],
        prefills=[
            _prefill_of(layout, request, int(first_block[request]), window, kv.key.dtype)
            for request in prefilling.tolist()
        ],
    )


def _batches(
    layout: BatchLayout, requests: np.ndarray, first_block: np.ndarray, kv: LayerKV
) -> list[np.ndarray]:
    """Cut decoding requests into batches of similar length that gather at most GATHER_BYTES."""
    if not len(requests):
        return []
    num_blocks = -(-layout.seq_lens_cpu[requests] // layout.block_size) - first_block[requests]
    order = np.argsort(num_blocks, kind="stable")
    block_bytes = kv.key[0].nbytes
    batches: list[list[int]] = [[]]
    for index in order.tolist():
        # Sorted, so that the newest is the longest and says how wide the batch would become.
        if batches[-1] and (len(batches[-1]) + 1) * num_blocks[index] * block_bytes > GATHER_BYTES:
            batches.append([])
        batches[-1].append(int(requests[index]))
    return [np.array(batch) for batch in batches]


def _decode_batch(
    layout: BatchLayout,
    requests: np.ndarray,
    first_block: np.ndarray,
    window: int | None,
    dtype: torch.dtype,
) -> _DecodeBatch:
    block_size = layout.block_size
    seq_lens = layout.seq_lens_cpu[requests][:, None]
    num_blocks = int((-(-layout.seq_lens_cpu[requests] // block_size) - first_block).max())
    # A shorter request is filled up with its own last page, whose tokens are masked then.
    columns = np.minimum(first_block[:, None] + np.arange(num_blocks), (seq_lens - 1) // block_size)
    positions = first_block[:, None] * block_size + np.arange(num_blocks * block_size)
    seen = positions < seq_lens
    if window is not None:
        seen &= positions >= seq_lens - window
    return _DecodeBatch(
        tokens=torch.from_numpy(layout.query_start_cpu[requests].astype(np.int64)),
        block_ids=layout.block_table[
            torch.from_numpy(requests)[:, None], torch.from_numpy(columns)
        ],
        mask=_as_mask(torch.from_numpy(seen), dtype)[:, None, None],
    )


def _prefill_of(
    layout: BatchLayout, request: int, first_block: int, window: int | None, dtype: torch.dtype
) -> _Prefill:
    first, last = layout.query_start_cpu[request : request + 2].tolist()
    seq_len = int(layout.seq_lens_cpu[request])
    num_queries, num_keys = last - first, seq_len - first_block * layout.block_size
    is_plain = num_queries == seq_len and (window is None or window >= seq_len)
    mask = None
    if not is_plain:
        seen = reference.visible(num_queries, num_keys, window, layout.block_table.device)
        mask = _as_mask(seen, dtype)
    return _Prefill(
        tokens=slice(first, last),
        block_ids=layout.block_table[request, first_block : -(-seq_len // layout.block_size)],
        keys=slice(0, num_keys),
        mask=mask,
    )


def _as_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `seen`, else -inf: what torch would make of `seen` in every layer anew."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
