"""Attention on CPU by our own kernel (`kernels/attention.cpp`), which reads pages in place.

bfloat16 only, like all our kernels; `cpu.py` does the rest.
"""

from typing import Any

import torch
from torch import Tensor

from workers.attention.base import AttentionCall
from workers.forward_context import BatchLayout
from workers.kv_cache import LayerKV
from workers.native import Kernels


class NativeAttention:
    """See `AttentionBackend`."""

    name = "native"
    block_size = 16
    can_be_captured = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, layout: BatchLayout) -> None:
        self._layout = layout

    def forward(self, call: AttentionCall, query_THD: Tensor, kv: LayerKV) -> Tensor:
        if query_THD.stride(2) != 1 or query_THD.stride(1) != query_THD.shape[2]:
            query_THD = query_THD.contiguous()
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype)
        self._kernels.attention(query_THD, out_THD, kv, self._layout, call)
        return out_THD


def can_attend(config: Any) -> bool:
    """Whether the heads of a model (transformers' configuration) fill the kernel's vectors."""
    size: int = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return size % 16 == 0
