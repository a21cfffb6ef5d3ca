"""Decoder layers: sums and the norms beside them in one call."""

from torch import Tensor, nn

from workers.linear import NativeLinear
from workers.native import Kernels
from workers.patcher.attention import FusedAttention
from workers.patcher.attention_probe import AttentionProbe
from workers.patcher.mlp import GatedMLP
from workers.patcher.norm import RMSNorm
from workers.patcher.probe import Differs, agree, without_hooks

_LAYER_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


class FusedLayer(nn.Module):
    """A layer of attention and MLP around a residual, with or without norms before its sums.

    Args:
        kernels: for sums and norms.
        attention: replaced already, as are the norms and the MLP.
        mlp: of the layer.
        norms: before attention, after it (or None), before the MLP, after it (or None).
    """

    def __init__(
        self,
        kernels: Kernels,
        attention: FusedAttention,
        mlp: GatedMLP,
        norms: tuple[RMSNorm, RMSNorm | None, RMSNorm, RMSNorm | None],
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = attention, mlp, norms[0]
        self._kernels = kernels
        self.factors = [None if norm is None else norm.factors for norm in norms[1:]]
        self.eps, self.rounds_first = norms[0].eps, norms[0].rounds_first

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **unused: object,
    ) -> Tensor:
        """transformers' interface; `[1, T, hidden]` in and out."""
        post_attention, pre_mlp, post_mlp = self.factors
        how = self.eps, self.rounds_first
        x, _ = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, attention_mask
        )
        total, x = self._kernels.add_and_norm(x, hidden_states, post_attention, pre_mlp, *how)
        total, _ = self._kernels.add_and_norm(self.mlp(x), total, post_mlp, None, *how)
        return total


def replace_layer(module: nn.Module, backend: NativeLinear) -> FusedLayer | None:
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, GatedMLP):
        return None
    norms = [getattr(module, f"{name}_layernorm", None) for name in _LAYER_NORMS]
    before, after_attention, before_mlp, after_mlp = norms
    if before_mlp is None:  # Llama calls the one before the MLP by what it comes after
        after_attention, before_mlp = None, after_attention
    found = [norm for norm in norms if norm is not None]
    if not all(isinstance(norm, RMSNorm) for norm in found):
        return None
    if before is None or before_mlp is None or len({(n.eps, n.rounds_first) for n in found}) > 1:
        return None
    norms_in_order = (before, after_attention, before_mlp, after_mlp)
    ours = FusedLayer(backend.kernels, attention, mlp, norms_in_order)
    probe = AttentionProbe(
        *(attention.layer_idx, attention.qkv_proj.in_features),
        *(attention.num_kv_heads, attention.head_dim),
    )
    with without_hooks(attention.o_proj), without_hooks(mlp.down_proj):
        if not all(map(agree, probe.run(ours), probe.run(module))):
            raise Differs
    return ours
