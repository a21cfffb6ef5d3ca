"""A pass through attention alone, or through a layer: one request of some tokens."""

import numpy as np
import torch
from torch import Tensor, nn

from workers.attention.base import AttentionCall
from workers.forward_context import BatchLayout, ForwardContext, forward_context
from workers.kv_cache import LayerKV
from workers.patcher.probe import PROBE_TOKENS, random_input


class _Recorder:
    """An `AttentionBackend` that keeps what it was asked, and answers with the query."""

    name = "probe"
    block_size = PROBE_TOKENS
    can_be_captured = False
    call: AttentionCall
    query_THD: Tensor

    def prepare(self, layout: BatchLayout) -> None:
        """Nothing is shared."""

    def forward(self, call: AttentionCall, query_THD: Tensor, kv: LayerKV) -> Tensor:
        self.call, self.query_THD = call, query_THD.clone()
        return self.query_THD


class AttentionProbe:
    """One request of some tokens, at random positions."""

    def __init__(self, layer_idx: int, hidden_size: int, num_kv_heads: int, head_dim: int) -> None:
        count = PROBE_TOKENS
        self.recorder = _Recorder()
        self._layer_idx = layer_idx
        self._kv_shape = (1, count, num_kv_heads, head_dim)
        self._hidden = random_input(1, count, hidden_size)
        angles = 3 * random_input(1, count, head_dim // 2).float()
        angles = torch.cat([angles, angles], dim=-1)
        self._rotary = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        self._layout = BatchLayout(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=torch.arange(count),
            query_start_cpu=np.array([0, count]),
            seq_lens_cpu=np.array([count]),
            max_query_len=count,
            max_seq_len=count,
            block_size=count,
        )

    def run(self, module: nn.Module) -> list[Tensor]:
        """Return query, key, value and output of one pass."""
        kv = LayerKV(*(torch.zeros(self._kv_shape, dtype=torch.bfloat16) for _ in range(2)))
        context = ForwardContext(self._layout, {self._layer_idx: kv}, self.recorder)
        with forward_context(context):
            output = module(self._hidden, position_embeddings=self._rotary, attention_mask=None)
        output = output[0] if isinstance(output, tuple) else output
        return [self.recorder.query_THD.flatten(1), kv.key.flatten(2), kv.value.flatten(2), output]
