"""Attention on CUDA by torch's own variable-length kernel, which reads pages through block tables.

NOTE: written from the signature and documentation of torch 2.13, and not proved on a GPU yet:
`tests/gpu/test_varlen_attention.py` compares it with the reference where there is one. Known
limits: no softcap and no sinks (refused), float16 and bfloat16 only, and FlashAttention 2 is said
to want pages of a multiple of 256 tokens: the default here; another --block-size is tried as it is.
"""

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.errors import ConfigError
from workers.attention.base import AttentionCall
from workers.forward_context import BatchLayout
from workers.kv_cache import LayerKV


class VarlenAttention:
    """See `AttentionBackend`."""

    name = "varlen"
    block_size = 256
    can_be_captured = True

    def prepare(self, layout: BatchLayout) -> None:
        self._layout = layout

    def forward(self, call: AttentionCall, query_THD: Tensor, kv: LayerKV) -> Tensor:
        _check(call, query_THD.dtype)
        layout = self._layout
        # The kernel counts the tokens to the left of a query; ours includes the query itself.
        left = -1 if call.window is None else call.window - 1
        out_THD = varlen_attn(
            query_THD,
            kv.key,
            kv.value,
            cu_seq_q=layout.query_start,
            cu_seq_k=None,
            max_q=layout.max_query_len,
            max_k=layout.max_seq_len,
            scale=call.scale,
            window_size=(left, 0),
            enable_gqa=query_THD.shape[1] != kv.key.shape[2],
            seqused_k=layout.seq_lens,
            block_table=layout.block_table,
        )
        assert isinstance(out_THD, Tensor)  # a pair only where auxiliary output is asked for
        return out_THD


def _check(call: AttentionCall, dtype: torch.dtype) -> None:
    if call.softcap is not None or call.sinks is not None:
        raise ConfigError(
            "attention back end varlen has neither softcap nor sinks, which this model wants; use"
            " --attention-backend reference"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"attention back end varlen computes in float16 or bfloat16, not {dtype}; use"
            " --attention-backend reference or --dtype bfloat16"
        )
