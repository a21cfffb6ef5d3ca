"""Size and number of the KV blocks of an engine core, and how long a request may be. Pure: from the
reports of its ranks and the settings. Used by `core` once, after the model has loaded.

One rule: the blocks hold at least one request of `max_model_len` tokens. So whatever is admitted
can run, if need be alone, and the scheduler never has to give up on a request.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.config import CacheConfig, ModelConfig
from engine.errors import ConfigError
from engine.step import WorkerReport

logger = logging.getLogger(__name__)

MIN_UNASKED_LEN = 1024
"""Tokens. A server that was told neither its length nor its memory shrinks to no less: that would
be no use to anybody, and an error says what to do."""


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    block_size: int
    """Tokens per block."""

    num_blocks: int
    """With the null block, which holds no tokens."""

    max_model_len: int

    num_tokens: int
    """Tokens in all blocks."""


def size_kv_cache(
    reports: Sequence[WorkerReport], model: ModelConfig, cache: CacheConfig
) -> KVCacheSize:
    """Number of blocks (the minimum over ranks) and maximum length.

    Raises:
        ConfigError: the wanted length does not fit the memory or the model; with the numbers, and
            with the largest length that would fit.
    """
    own_length = min(report.model_max_len for report in reports)
    wanted = model.max_model_len
    if isinstance(wanted, int) and not 1 <= wanted <= own_length:
        raise ConfigError(
            f"--max-model-len {wanted} must be from 1 to {own_length}, the model's own maximum"
        )
    length = wanted if isinstance(wanted, int) else own_length
    block_size = cache.block_size or max(report.block_size for report in reports)
    num_blocks = cache.num_gpu_blocks_override or _blocks_in_memory(reports, block_size)
    capacity = max(num_blocks - 1, 0) * block_size
    if length > capacity:
        if capacity < _shortest_length(wanted, cache):
            raise _too_small(reports, cache, block_size, length, capacity)
        logger.warning(
            "max_model_len is %d instead of the model's %d: the KV cache holds no more;"
            " --kv-cache-memory-bytes enlarges it",
            capacity,
            own_length,
        )
        length = capacity
    return KVCacheSize(block_size, num_blocks, length, capacity)


def _shortest_length(wanted: int | Literal["auto"] | None, cache: CacheConfig) -> int:
    """What the length may shrink to, in tokens, rather than that the start fails."""
    if isinstance(wanted, int):
        return wanted
    # An override says how many blocks there shall be: then the model's own length is no demand.
    if wanted == "auto" or cache.num_gpu_blocks_override is not None:
        return 1
    # Who says how much memory, but not how long, wants to know that the two do not go together.
    return MIN_UNASKED_LEN if cache.kv_cache_memory_bytes is None else sys.maxsize


def _blocks_in_memory(reports: Sequence[WorkerReport], block_size: int) -> int:
    return min(
        report.kv_budget_bytes // (report.kv_bytes_per_token * block_size) for report in reports
    )


def _too_small(
    reports: Sequence[WorkerReport],
    cache: CacheConfig,
    block_size: int,
    length: int,
    capacity: int,
) -> ConfigError:
    if cache.num_gpu_blocks_override is not None:
        return ConfigError(
            f"--max-model-len {length} needs more than --num-gpu-blocks-override"
            f" {cache.num_gpu_blocks_override}, which holds {capacity} tokens"
        )
    tightest = min(reports, key=lambda report: report.kv_budget_bytes / report.kv_bytes_per_token)
    num_blocks = -(-length // block_size) + 1
    needed = num_blocks * block_size * tightest.kv_bytes_per_token
    remedy = (
        f"lower --max-model-len to {capacity} or to auto, or free memory"
        if capacity
        else "free memory"
    )
    return ConfigError(
        f"a request of max_model_len={length} tokens needs {_mib(needed)} of KV cache,"
        f" but rank {tightest.rank} has {_mib(tightest.kv_budget_bytes)}:"
        f" {remedy} (--kv-cache-memory-bytes sets the size)"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB ({num_bytes} bytes)"
