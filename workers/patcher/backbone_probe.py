"""A pass through all layers of a backbone: prefills and decodes, at their start and later."""

import numpy as np
import torch
from torch import Tensor, nn

from workers.attention.native import NativeAttention
from workers.forward_context import BatchLayout, ForwardContext, forward_context
from workers.kv_cache import LayerKV
from workers.native import Kernels
from workers.patcher.attention import FusedAttention
from workers.patcher.probe import random_input

_QUERY_LENS = np.array([5, 1, 9, 1])
_SEQ_LENS = np.array([5, 18, 27, 1])
_BLOCK_SIZE = 16


class BackboneProbe:
    """A step of prefills and decodes over pages that are filled already.

    Args:
        layers: attention of each layer on this stage.
        kernels: for attention.
    """

    def __init__(self, layers: list[FusedAttention], kernels: Kernels) -> None:
        self._layers = layers
        self._backend = NativeAttention(kernels)
        ends = np.cumsum(_QUERY_LENS)
        self._num_tokens = int(ends[-1])
        firsts = _SEQ_LENS - _QUERY_LENS
        places = [range(*span) for span in zip(firsts, _SEQ_LENS, strict=True)]
        self._positions = torch.tensor([place for span in places for place in span])
        self._block_table = torch.randperm(
            2 * len(_SEQ_LENS), generator=torch.Generator().manual_seed(4)
        ).view(len(_SEQ_LENS), 2)
        slots = [
            self._block_table[request, place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE
            for request, span in enumerate(places)
            for place in span
        ]
        query_start = np.concatenate([[0], ends])
        self._layout = BatchLayout(
            query_start=torch.from_numpy(query_start).int(),
            seq_lens=torch.from_numpy(_SEQ_LENS).int(),
            block_table=self._block_table.int(),
            slot_mapping=torch.stack(slots),
            query_start_cpu=query_start,
            seq_lens_cpu=_SEQ_LENS,
            max_query_len=int(_QUERY_LENS.max()),
            max_seq_len=int(_SEQ_LENS.max()),
            block_size=_BLOCK_SIZE,
        )

    def run(self, backbone: nn.Module) -> list[Tensor]:
        """Return the last states, and the pages of each layer."""
        kv_cache = {layer.layer_idx: self._pages(layer) for layer in self._layers}
        self._backend.prepare(self._layout)
        with forward_context(ForwardContext(self._layout, kv_cache, self._backend)):
            output = backbone(
                **self._inputs(backbone), position_ids=self._positions[None], use_cache=False
            )
        pages = [kv.flatten(2) for layer in kv_cache.values() for kv in layer]
        return [output.last_hidden_state, *pages]

    def _pages(self, layer: FusedAttention) -> LayerKV:
        shape = (self._block_table.numel(), _BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
        return LayerKV(random_input(*shape), random_input(*shape).flip(0))

    def _inputs(self, backbone: nn.Module) -> dict[str, Tensor]:
        ids = torch.arange(self._num_tokens)[None]
        # A later stage has no embedding: it is given states.
        if backbone.embed_tokens(ids).dim() == 3:  # type: ignore[operator]
            return {"input_ids": ids}
        hidden_size = self._layers[0].qkv_proj.in_features
        return {"inputs_embeds": random_input(1, self._num_tokens, hidden_size)}
