"""Backbones: the embedding, then all layers and the last norm in one call.

Where every layer is ours, and has no hooks that would have to run in between. The original stays:
it knows how positions become rotary embeddings, and runs the layers one by one where attention is
not our kernel's.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workers.attention.native import NativeAttention
from workers.forward_context import current
from workers.layer_stack import DecoderLayer, LayerStack, LinearLayer, address
from workers.linear import NativeLinear, PackedEmbedding, PackedLinear
from workers.native import Kernels
from workers.patcher.backbone_probe import BackboneProbe
from workers.patcher.layer import FusedLayer
from workers.patcher.norm import RMSNorm
from workers.patcher.probe import Differs, agree, has_hooks
from workers.patcher.rotary import RotaryTables
from workers.pipeline_parallel import PassThrough


class BackboneOutput(NamedTuple):
    """What is asked of transformers' class of that kind, which takes longer to make than some
    kernels run."""

    last_hidden_state: Tensor


class FusedBackbone(nn.Module):
    """A backbone whose layers run in one call.

    Args:
        kernels: for the layers.
        original: transformers' module, with replaced layers. Those of other pipeline stages may be
            among them, which pass through what they get.
        last_norm: behind the layers, or None on a stage that has none.
    """

    def __init__(self, kernels: Kernels, original: Any, last_norm: RMSNorm | None) -> None:
        super().__init__()
        self.original, self.embed_tokens = original, original.embed_tokens
        layers = layers_of(original)
        first = layers[0]
        self._hidden_size = hidden_size = first.self_attn.qkv_proj.in_features
        self._rotary = RotaryTables(original, hidden_size)
        tables = [
            table
            for layer, table in zip(original.layers, self._rotary.of_layer, strict=True)
            if isinstance(layer, FusedLayer)
        ]
        # The struct names them by address.
        self._sinks = [
            None if (sinks := layer.self_attn.call.sinks) is None else sinks.float()
            for layer in layers
        ]
        self._stack = LayerStack(
            kernels,
            {
                layer.self_attn.layer_idx: _describe(layer, table, sinks)
                for layer, table, sinks in zip(layers, tables, self._sinks, strict=True)
            },
            self._rotary.tables,
            hidden_size=hidden_size,
            head_size=first.self_attn.head_dim,
            eps=first.eps,
            rounds_first=first.rounds_first,
            last_norm=None if last_norm is None else last_norm.factors,
            embedding=_embedding(self.embed_tokens),
        )
        self._embeds = _embedding(self.embed_tokens) is not None

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **unused: object,
    ) -> BackboneOutput:
        """transformers' interface, for one flat batch: `[1, T]` ids and positions, `[1, T, hidden]`
        states. States that are given are overwritten."""
        context = current()
        if not isinstance(context.backend, NativeAttention):
            output = self.original(
                input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, use_cache=False
            )
            return BackboneOutput(output.last_hidden_state)
        assert position_ids is not None
        if self._rotary.cover(context.layout.max_seq_len):
            self._stack.set_tables(self._rotary.tables)
        ids = None
        if inputs_embeds is not None:
            states = inputs_embeds[0].contiguous()
        elif self._embeds:
            assert input_ids is not None
            ids = input_ids[0]
            states = torch.empty(len(ids), self._hidden_size, dtype=torch.bfloat16)
        else:
            states = self.embed_tokens(input_ids)[0].contiguous()
        self._stack.run(states, ids, position_ids[0], context.layout, context.kv_cache)
        return BackboneOutput(states[None])


def replace_backbone(module: nn.Module, backend: NativeLinear) -> FusedBackbone | None:
    last_norm = getattr(module, "norm", None)
    if not isinstance(last_norm, RMSNorm | nn.Identity) or not hasattr(module, "embed_tokens"):
        return None
    last_norm = last_norm if isinstance(last_norm, RMSNorm) else None
    layers = layers_of(module)
    if not layers or has_hooks(module) or not all(map(_is_plain, layers)):
        return None
    norms = layers if last_norm is None else [*layers, last_norm]
    if len({(norm.eps, norm.rounds_first) for norm in norms}) > 1:
        return None
    if len({layer.self_attn.head_dim for layer in layers}) > 1:
        return None
    ours = FusedBackbone(backend.kernels, module, last_norm)
    probe = BackboneProbe([layer.self_attn for layer in layers], backend.kernels)
    if not all(map(agree, probe.run(ours), probe.run(module))):
        raise Differs
    return ours


def layers_of(backbone: nn.Module) -> list[FusedLayer]:
    """A backbone's layers on this stage; none of them if there are others than ours."""
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    if not all(isinstance(layer, FusedLayer | PassThrough) for layer in layers):
        return []
    return [layer for layer in layers if isinstance(layer, FusedLayer)]


def _is_plain(layer: FusedLayer) -> bool:
    """Whether a layer is nothing but what the struct says."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return not has_hooks(*layer.modules()) and all(
        type(linear) is PackedLinear and linear.out_dtype == torch.bfloat16 for linear in linears
    )


def _describe(layer: FusedLayer, table: int, sinks: Tensor | None) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    after_attention, before_mlp, after_mlp = layer.factors
    query_norm, key_norm = attention.factors or (None, None)
    return DecoderLayer(
        qkv=_linear(attention.qkv_proj),
        out=_linear(attention.o_proj),
        gate_up=_linear(mlp.gate_up_proj),
        down=_linear(mlp.down_proj),
        before_attention=address(layer.input_layernorm.factors),
        after_attention=address(after_attention),
        before_mlp=address(before_mlp),
        after_mlp=address(after_mlp),
        query_norm=address(query_norm),
        key_norm=address(key_norm),
        sinks=address(sinks),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        window=attention.call.window or 0,
        rotary=table,
        scale=attention.call.scale,
        softcap=attention.call.softcap or 0.0,
        head_eps=attention.eps,
        heads_round_first=attention.rounds_first,
    )


def _embedding(module: nn.Module) -> tuple[LinearLayer, float] | None:
    """The head that an embedding reads, and the scale of its rows; None where it is another kind of
    module, or has hooks."""
    if not isinstance(module, PackedEmbedding) or has_hooks(module):
        return None
    if type(module.head) is not PackedLinear:
        return None
    return LinearLayer.of(module.head), 0.0 if module.scale is None else float(module.scale)


def _linear(module: nn.Module) -> LinearLayer:
    assert isinstance(module, PackedLinear)
    return LinearLayer.of(module)
