"""The paged KV cache of one rank: a pair of tensors per layer, and where each token goes in them.

    block_table[request]     7      2      9           blocks of 4 tokens
    positions             0 1 2 3 4 5 6 7 8 9
    slots                28 …  31 8 …  11 36 37        block id × block size + offset in the block

The engine core decides who holds which block; here is only memory.
"""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError

GIB = 1 << 30


class LayerKV(NamedTuple):
    """Keys and values of one layer: `[num_blocks, block_size, num_kv_heads, head_dim]` each."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token needs in each layer of this rank."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """In one layer: key and value."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def allocate(
    shape: KVShape,
    layer_indices: Iterable[int],
    num_blocks: int,
    block_size: int,
    device: torch.device,
) -> dict[int, LayerKV]:
    """Return empty pages for each layer, all zero. Once used, a page holds what its last owner left
    until the next one writes there."""
    size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    return {
        index: LayerKV(_zeros(size, shape.dtype, device), _zeros(size, shape.dtype, device))
        for index in layer_indices
    }


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # Pages that the kernel hands out when they are first written: the cache of an idle server
    # occupies nothing, and is there at once. Not by malloc, whose zeros may be pages that were used
    # before and have to be cleared, hundreds of MiB of them.
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    return torch.from_numpy(np.frombuffer(pages, np.uint8)).view(dtype).view(size)


def write(kv: LayerKV, key_TKD: Tensor, value_TKD: Tensor, slot_mapping: Tensor) -> None:
    """Store this step's keys and values, `[num_tokens, num_kv_heads, head_dim]`, in their slots."""
    kv.key.flatten(0, 1).index_copy_(0, slot_mapping, key_TKD)
    kv.value.flatten(0, 1).index_copy_(0, slot_mapping, value_TKD)


def slot_mapping(
    block_table: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Return the KV-cache slot of each scheduled token.

    Args:
        block_table: `[num_rows, max_blocks]` int32.
        rows: `[num_tokens]`, the row of `block_table` each token belongs to.
        positions: `[num_tokens]` int64, each token's place in its own request.
        block_size: tokens per block.

    Returns:
        `[num_tokens]` int64: block id times `block_size`, plus the offset in the block.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.
    """
    blocks, offsets = np.divmod(positions, block_size)
    slots: np.ndarray = block_table[rows, blocks].astype(np.int64) * block_size + offsets
    return slots


def check_fits(num_bytes: int, available: int, what: str) -> None:
    """Raise ConfigError if `num_bytes` are not to be had."""
    if num_bytes > available:
        raise ConfigError(
            f"{what} needs {num_bytes / GIB:.2f} GiB on this worker, and {available / GIB:.2f} GiB"
            " are available"
        )
