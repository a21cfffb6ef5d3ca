"""Attention in plain PyTorch, one request at a time: what the other back ends are compared with.

Written to be read against the formula, softmax(q kᵀ · scale) v in float32. Runs on any device, and
honours everything an `AttentionCall` can ask for.
"""

import torch
from torch import Tensor

from workers.attention.base import AttentionCall
from workers.forward_context import BatchLayout
from workers.kv_cache import LayerKV


class ReferenceAttention:
    """See `AttentionBackend`."""

    name = "reference"
    block_size = 16
    can_be_captured = False

    def prepare(self, layout: BatchLayout) -> None:
        self._layout = layout

    def forward(self, call: AttentionCall, query_THD: Tensor, kv: LayerKV) -> Tensor:
        layout = self._layout
        out_THD = torch.empty_like(query_THD)
        for request, seq_len in enumerate(layout.seq_lens_cpu.tolist()):
            first, last = layout.query_start_cpu[request : request + 2].tolist()
            block_ids = layout.block_table[request, : -(-seq_len // layout.block_size)]
            out_THD[first:last] = attend(
                call,
                query_THD[first:last],
                kv.key[block_ids].flatten(0, 1)[:seq_len],
                kv.value[block_ids].flatten(0, 1)[:seq_len],
            )
        return out_THD


def attend(call: AttentionCall, query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
    """Return `[T, H, D]`: attention of the last T of S tokens over all S of one request."""
    num_heads, num_kv_heads = query_THD.shape[1], key_SKD.shape[1]
    key_SHD = key_SKD.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    value_SHD = value_SKD.float().repeat_interleave(num_heads // num_kv_heads, dim=1)

    scores_HTS = torch.einsum("thd,shd->hts", query_THD.float(), key_SHD) * call.scale
    if call.softcap is not None:
        scores_HTS = call.softcap * torch.tanh(scores_HTS / call.softcap)
    visible_TS = visible(len(query_THD), len(key_SKD), call.window, query_THD.device)
    scores_HTS = scores_HTS.masked_fill(~visible_TS, -torch.inf)
    if call.sinks is not None:
        sinks_HT1 = call.sinks.float()[:, None, None].expand(-1, len(query_THD), 1)
        scores_HTS = torch.cat([scores_HTS, sinks_HT1], dim=-1)
    weights_HTS = scores_HTS.softmax(dim=-1)[..., : len(key_SKD)]
    return torch.einsum("hts,shd->thd", weights_HTS, value_SHD).to(query_THD.dtype)


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return `[num_queries, num_keys]` bool: may this query, one of the last tokens, see that
    key?"""
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :, None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
