"""Protocol of an attention back end: the one part of a model's arithmetic that is ours.

A back end is asked twice: `prepare` once per step, for what all layers share (index tensors,
masks), and `forward` once per layer. Keys and values of the step are in the cache by then.
`reference.py` is the plain version that tests compare the others with.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from workers.kv_cache import LayerKV

if TYPE_CHECKING:
    from workers.forward_context import BatchLayout  # which names this module's protocol


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer wants, beyond its tensors."""

    scale: float
    """Factor of the scores before the softmax."""
    window: int | None = None
    """Tokens that a query sees, itself included; None is all before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)`."""
    sinks: Tensor | None = None
    """`[num_heads]`: one more score per head in the softmax, without a value."""


class AttentionBackend(Protocol):
    """Causal attention of flat queries over paged keys and values.

    Shapes: T tokens of this step, H query heads, K key heads (H is a multiple of K), D head size.
    """

    name: str

    block_size: int
    """Tokens per page that it reads best, used unless the user says."""

    can_be_captured: bool
    """Whether a CUDA graph of its calls serves other steps too: of a layout they read tensors, and
    the two maxima as bounds."""

    def prepare(self, layout: "BatchLayout") -> None:
        """Derive what all layers of the coming forward pass share."""

    def forward(self, call: AttentionCall, query_THD: Tensor, kv: LayerKV) -> Tensor:
        """Return `[T, H, D]`: attention of each query over its request's tokens up to itself.

        Args:
            call: scale, window and the rarer wishes of this layer.
            query_THD: queries of all requests, one after the other as in the layout.
            kv: this layer's pages; they hold this step's keys and values already.
        """
