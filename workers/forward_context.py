"""What attention reads during a forward pass: who the tokens belong to, and the KV of each layer.

transformers' model code calls attention with query, key and value alone. The rest is here, in one
module-level context that `CausalLM.forward` sets around the call: a worker runs one forward pass at
a time.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from workers.attention.base import AttentionBackend
from workers.kv_cache import LayerKV


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How the flat tokens of a step divide into requests. Shared by all layers.

        tokens       a a a a b c c        three requests: a prefill of 4, a decode, a prefill of 2
        query_start  0 4 5 7
        seq_lens     4 9 2                b has 8 tokens in the cache already

    Tensors are on the device; the numpy arrays hold the same on the host, for back ends that loop
    over requests there.
    """

    query_start: Tensor
    """`[num_reqs + 1]` int32: first token of each request, then the number of tokens."""
    seq_lens: Tensor
    """`[num_reqs]` int32: tokens in the cache once this step's are written."""
    block_table: Tensor
    """`[num_reqs, max_blocks]` int32; entries beyond a request's length are anything."""
    slot_mapping: Tensor
    """`[num_tokens]` int64: where each token's key and value go."""
    query_start_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    max_query_len: int
    max_seq_len: int
    block_size: int


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything one forward pass shares."""

    layout: BatchLayout
    kv_cache: Mapping[int, LayerKV]
    """By the layer's index in the whole model; only this pipeline stage's layers."""
    backend: AttentionBackend


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the one that attention reads, while the block runs."""
    global _current
    _current = context
    try:
        yield
    finally:
        _current = None


def current() -> ForwardContext:
    """The context of the forward pass under way."""
    assert _current is not None, "attention was called outside a forward pass"
    return _current
