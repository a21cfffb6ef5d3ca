"""Packed masks of tokens, laid over logits: what is not allowed becomes minus infinity.

Used by `sampler` before anything else looks at the logits, and by `logit_edits`, whose own bans
must leave something of what a mask allows. The engine core packs the masks (`engine.step`).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.native import Kernels

Bits = NDArray[np.uint32]
"""`[…, ceil(vocab_size / 32)]`: token i is bit i % 32 of word i // 32."""


def apply(logits: Tensor, rows: list[int], bits: Bits, kernels: Kernels | None = None) -> None:
    """Mask some rows of logits in place.

    Args:
        logits: `[n, vocab]` float32; rows that lie apart are slower.
        rows: which rows.
        bits: `[len(rows), words]`, the mask of each.
        kernels: that do it; None leaves it to torch.

    Raises:
        ValueError: the masks are not as long as the vocabulary.
    """
    num_words = -(-logits.shape[1] // 32)
    if bits.shape != (len(rows), num_words):
        raise ValueError(f"masks {bits.shape} for {len(rows)} rows of {num_words} words")
    if kernels is not None and logits.is_contiguous():
        kernels.mask_logits(logits, np.array(rows, np.int64), np.ascontiguousarray(bits))
        return
    words = torch.from_numpy(bits.view(np.int32).copy()).to(logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, of_row in zip(rows, words, strict=True):  # one at a time: unpacked they are large
        is_banned = (of_row[:, None] >> shifts & 1).flatten()[: logits.shape[1]] == 0
        logits[row].masked_fill_(is_banned, -torch.inf)


def are_allowed(bits: Bits, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a mask `[words]` allows each of some tokens."""
    allowed: NDArray[np.bool_] = (
        bits[token_ids >> 5] >> (token_ids & 31).astype(np.uint32) & 1
    ) > 0
    return allowed


def num_allowed(bits: Bits) -> int:
    """How many tokens a mask `[words]` allows."""
    return int.from_bytes(bits.tobytes(), "little").bit_count()
