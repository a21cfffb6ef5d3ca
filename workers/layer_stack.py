"""Decoder layers as `kernels/layers.h` has them: described once, run in one call a step.

Structs hold addresses. Whoever makes a description keeps the tensors that it names.
"""

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from workers.forward_context import BatchLayout
from workers.kv_cache import LayerKV
from workers.linear import PackedLinear
from workers.native import Kernels

_BFLOAT16, _EIGHT_BITS = 0, 1


class LinearLayer(Structure):
    """A packed linear layer of any kind."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("kind", c_int32),
        ("activation", c_int32),
    ]

    @classmethod
    def of(cls, layer: PackedLinear) -> "LinearLayer":
        num_outputs = layer.out_features if layer.activation == 0 else 2 * layer.out_features
        return cls(
            weight=address(layer.packed),
            bias=address(layer.packed_bias),
            num_inputs=layer.in_features,
            num_outputs=num_outputs,
            kind=_EIGHT_BITS if layer.packed.dtype == torch.int8 else _BFLOAT16,
            activation=layer.activation,
        )


class DecoderLayer(Structure):
    """Attention and a gated MLP around a residual. KV pages are filled in by `LayerStack`."""

    _fields_ = [
        *((name, LinearLayer) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("before_attention", "after_attention")),
        *((name, c_void_p) for name in ("before_mlp", "after_mlp")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "sinks")),
        *((name, c_void_p) for name in ("key_pages", "value_pages")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "window", "rotary")),
        *((name, c_float) for name in ("scale", "softcap", "head_eps")),
        ("heads_round_first", c_int32),
    ]


class RotaryTable(Structure):
    """Cosine and sine of each position, bfloat16 `[positions, head_size]`."""

    _fields_ = [("cosine", c_void_p), ("sine", c_void_p)]


class _Stack(Structure):
    _fields_ = [
        ("layers", POINTER(DecoderLayer)),
        ("tables", POINTER(RotaryTable)),
        ("embedding", LinearLayer),
        ("last_norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "num_tables", "hidden_size", "head_size")),
        *((name, c_float) for name in ("embedding_scale", "eps")),
        ("rounds_first", c_int32),
    ]


class _StepLayout(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "positions", "slots")),
        *((name, c_void_p) for name in ("block_table", "query_start", "seq_lens")),
        *((name, c_int64) for name in ("num_tokens", "num_reqs", "block_size", "table_stride")),
    ]


class LayerStack:
    """Layers that follow each other, one call for all of them.

    Args:
        kernels: that run them.
        layers: by the layer's index in the whole model, in order.
        tables: cosine and sine, which the layers name by number; `set_tables` gives longer ones.
        hidden_size: of the states between layers.
        head_size: of all heads.
        eps: of all norms but the heads'.
        rounds_first: likewise; see `Kernels.rms_norm`.
        last_norm: factors of a norm behind the last layer, float32, or None.
        embedding: the packed head whose rows embed tokens, and what they are multiplied with; None
            where states are given.
    """

    def __init__(
        self,
        kernels: Kernels,
        layers: Mapping[int, DecoderLayer],
        tables: Sequence[tuple[Tensor, Tensor]],
        *,
        hidden_size: int,
        head_size: int,
        eps: float,
        rounds_first: bool,
        last_norm: Tensor | None,
        embedding: tuple[LinearLayer, float] | None = None,
    ) -> None:
        self._kernels = kernels
        self._indices = list(layers)
        self._layers = (DecoderLayer * len(layers))(*layers.values())
        self._tables = (RotaryTable * len(tables))()
        self._stack = _Stack(
            layers=self._layers,
            tables=self._tables,
            last_norm=address(last_norm),
            num_layers=len(layers),
            num_tables=len(tables),
            hidden_size=hidden_size,
            head_size=head_size,
            eps=eps,
            rounds_first=rounds_first,
        )
        if embedding is not None:
            self._stack.embedding, self._stack.embedding_scale = embedding
        self._step = _StepLayout()
        self._row_size = kernels.layers_memory(self._stack)
        self._kv_cache: Mapping[int, LayerKV] | None = None
        self.set_tables(tables)

    def set_tables(self, tables: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take cosine and sine of every position that is to come, `[positions, head_size]` each.
        The caller keeps them."""
        for table, (cosine, sine) in zip(self._tables, tables, strict=True):
            table.cosine, table.sine = address(cosine), address(sine)

    def run(
        self,
        states: Tensor,
        ids: Tensor | None,
        positions: Tensor,
        layout: BatchLayout,
        kv_cache: Mapping[int, LayerKV],
    ) -> None:
        """Run all layers, in place.

        Args:
            states: `[num_tokens, hidden_size]`, contiguous. With ids only memory.
            ids: `[num_tokens]` int64, which the embedding turns into states; None where those are
                given.
            positions: `[num_tokens]` int64, all of them in the tables.
            layout: whose tokens they are.
            kv_cache: of these layers; keys and values of the tokens are written into it.
        """
        if kv_cache is not self._kv_cache:
            self._point_at(kv_cache)
        step = self._step
        step.ids = None if ids is None else ids.data_ptr()
        step.positions, step.slots = positions.data_ptr(), layout.slot_mapping.data_ptr()
        step.block_table = layout.block_table.data_ptr()
        step.query_start, step.seq_lens = layout.query_start.data_ptr(), layout.seq_lens.data_ptr()
        step.num_tokens, step.num_reqs = len(states), len(layout.seq_lens)
        step.table_stride = layout.block_table.stride(0)
        memory = torch.empty(len(states) * self._row_size, dtype=torch.bfloat16)
        self._kernels.layers(self._stack, step, states, memory)

    def _point_at(self, kv_cache: Mapping[int, LayerKV]) -> None:
        for index, layer in zip(self._indices, self._layers, strict=True):
            kv = kv_cache[index]
            layer.key_pages, layer.value_pages = address(kv.key), address(kv.value)
            self._step.block_size = kv.key.shape[1]
        self._kv_cache = kv_cache


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor lies; None for none."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
