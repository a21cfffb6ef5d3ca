"""Rotary embedding, looked up: cosine and sine of every position, computed when first wanted.

A backbone computes them in each step for the positions at hand, and gives every layer those of its
kind. Here the backbone itself computes them for all positions in order, with layers that only
listen: how it does that stays its own business, as long as a position's numbers depend on nothing
else. `loader` refuses models where they do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1024
"""Positions that are computed at once."""

Table = tuple[Tensor, Tensor]
"""Cosine and sine, `[positions, head_size]` each."""


class RotaryTables:
    """The tables of a backbone's layers, which grow.

    Args:
        backbone: transformers', with its layers in `layers`.
        hidden_size: of the states between layers.
    """

    def __init__(self, backbone: Any, hidden_size: int) -> None:
        self._backbone = backbone
        self._hidden_size = hidden_size
        self.tables, self.of_layer = self._listen(0)
        """Each kind of layer has its own; the second is which of them each layer takes."""

    @property
    def num_positions(self) -> int:
        return len(self.tables[0][0])

    def cover(self, num_positions: int) -> bool:
        """Let the tables hold so many positions, and if that is news, as many again for those to
        come. Returns whether they have moved."""
        known = self.num_positions
        if num_positions <= known:
            return False
        added = [self._listen(first)[0] for first in range(known, 2 * num_positions, CHUNK)]
        self.tables = [
            (torch.cat([cosine for cosine, _ in parts]), torch.cat([sine for _, sine in parts]))
            for parts in zip(self.tables, *added, strict=True)
        ]
        return True

    @torch.inference_mode()
    def _listen(self, first: int) -> tuple[list[Table], list[int]]:
        states = torch.zeros(1, CHUNK, self._hidden_size, dtype=torch.bfloat16)
        positions = torch.arange(first, first + CHUNK)[None]
        with _listening(self._backbone) as listeners:
            self._backbone(inputs_embeds=states, position_ids=positions, use_cache=False)
        heard = [listener.heard for listener in listeners]
        kinds = list({id(cosine): None for cosine, _ in heard})
        of_layer = [kinds.index(id(cosine)) for cosine, _ in heard]
        tables = [heard[of_layer.index(kind)] for kind in range(len(kinds))]
        return [(cosine[0].contiguous(), sine[0].contiguous()) for cosine, sine in tables], of_layer


class _Listener(nn.Module):
    """Stands where a layer was."""

    heard: Table

    def forward(
        self, hidden_states: Tensor, *_: object, position_embeddings: Table, **__: object
    ) -> Tensor:
        self.heard = position_embeddings
        return hidden_states


@contextmanager
def _listening(backbone: Any) -> Iterator[list[_Listener]]:
    layers = backbone.layers
    listeners = [_Listener() for _ in layers]
    backbone.layers = nn.ModuleList(listeners)
    try:
        yield listeners
    finally:
        backbone.layers = layers
