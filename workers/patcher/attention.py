"""Attention: query, key and value in one call; their norms and rotary embedding in another."""

import torch
from torch import Tensor, nn

from workers.attention.base import AttentionCall
from workers.forward_context import current
from workers.linear import BLOCK, NativeLinear, PackedLinear
from workers.native import Kernels
from workers.patcher.attention_probe import AttentionProbe
from workers.patcher.norm import RMSNorm
from workers.patcher.parts import linear_parts
from workers.patcher.probe import Differs, agree, has_hooks, without_hooks


class FusedAttention(nn.Module):
    """Attention with rotary embedding, its projections and norms in two calls.

    Args:
        kernels: for norms and rotary embedding.
        qkv: the three projections, one after the other.
        out: the output projection.
        num_kv_heads: of this rank.
        head_dim: of each head.
        norms: of query and key heads, or None.
        layer_idx: whose KV cache.
        call: scale, window and the rest, as the original gave them to the back end.
    """

    def __init__(
        self,
        kernels: Kernels,
        qkv: PackedLinear,
        out: nn.Module,
        num_kv_heads: int,
        head_dim: int,
        norms: tuple[RMSNorm, RMSNorm] | None,
        layer_idx: int,
        call: AttentionCall,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = qkv, out
        self._kernels = kernels
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.num_heads = qkv.out_features // head_dim - 2 * num_kv_heads
        self.layer_idx, self.call = layer_idx, call
        self.factors = (norms[0].factors, norms[1].factors) if norms else None
        self.eps = norms[0].eps if norms else 0.0
        self.rounds_first = norms[0].rounds_first if norms else False

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """transformers' interface; `[1, T, hidden]` in and out."""
        assert attention_mask is None, "masks are ours: see BatchLayout"
        qkv_THD = self.qkv_proj(hidden_states)[0].view(hidden_states.shape[1], -1, self.head_dim)
        cos, sin = (x[0].contiguous() for x in position_embeddings)
        self._kernels.norm_and_rotate(
            *(qkv_THD, self.factors, (cos, sin), self.num_kv_heads),
            *(self.eps, self.rounds_first),
        )
        query_THD, key_TKD, value_TKD = qkv_THD.split(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        context = current()
        kv = context.kv_cache[self.layer_idx]
        self._kernels.write_kv(kv, key_TKD, value_TKD, context.layout.slot_mapping)
        out_THD = context.backend.forward(self.call, query_THD, kv)
        return self.o_proj(out_THD.flatten(1)[None]), None


def replace_attention(module: nn.Module, backend: NativeLinear) -> FusedAttention | None:
    projections = linear_parts(module, "q_proj", "k_proj", "v_proj", "o_proj")
    head_dim: int | None = getattr(module, "head_dim", None)
    if head_dim is None or projections is None or _rotates_a_part(module):
        return None
    query, key, value, out = projections
    if head_dim % (2 * BLOCK) or query.in_features % 2 or has_hooks(query, key, value):
        return None
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    has_norms = norms != [None, None]
    if has_norms and not all(_is_norm(norm, head_dim) for norm in norms):
        return None
    num_kv_heads, layer_idx = key.out_features // head_dim, int(module.layer_idx)  # type: ignore[arg-type]
    probe = AttentionProbe(layer_idx, query.in_features, num_kv_heads, head_dim)
    with without_hooks(out):
        theirs = probe.run(module)
        has_bias = query.bias is not None
        qkv = backend.pack(
            torch.cat([part.weight for part in (query, key, value)]),
            torch.cat([part.bias for part in (query, key, value)]) if has_bias else None,
        )
        ours = FusedAttention(
            backend.kernels,
            qkv,
            out,
            num_kv_heads,
            head_dim,
            tuple(norms) if has_norms else None,  # type: ignore[arg-type]
            layer_idx,
            probe.recorder.call,
        )
        if not all(map(agree, probe.run(ours), theirs)):
            raise Differs
    return ours


def _rotates_a_part(module: nn.Module) -> bool:
    """Whether the backbone's rotary embedding covers a part of each head, as its configuration
    says. The probe's covers all of it, so it would not tell."""
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(part.get("partial_rotary_factor", 1.0) != 1.0 for part in of_kinds)


def _is_norm(norm: object, head_dim: int) -> bool:
    return isinstance(norm, RMSNorm) and len(norm.factors) == head_dim
