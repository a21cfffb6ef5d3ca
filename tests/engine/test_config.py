"""Settings that cannot work are refused where they are made."""

import dataclasses
from typing import Any

import pytest

from engine import config
from engine.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (CacheConfig, {"block_size": 3}, "--block-size must be a power of two"),
        (CacheConfig, {"block_size": 0}, "--block-size"),
        (CacheConfig, {"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes must be positive"),
        (CacheConfig, {"num_gpu_blocks_override": 1}, "at least 2"),
        (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs must be from 1"),
        (SchedulerConfig, {"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        (SchedulerConfig, {"max_num_batched_tokens": 8, "max_num_seqs": 9}, "raise the first or"),
        (ParallelConfig, {"tensor_parallel_size": 0}, "tensor_parallel_size"),
        (ParallelConfig, {"pipeline_parallel_size": -1}, "pipeline_parallel_size"),
        (ParallelConfig, {"data_parallel_size": 0}, "data_parallel_size"),
    ],
)
def test_impossible_settings_are_refused(
    kind: type, settings: dict[str, Any], message: str
) -> None:
    """One line that names the setting and what it must be."""
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("tp", "pp", "world_size", "output_rank"),
    [(1, 1, 1, 0), (4, 1, 4, 0), (1, 3, 3, 2), (2, 2, 4, 2), (2, 4, 8, 6)],
)
def test_the_first_rank_of_the_last_stage_replies(
    tp: int, pp: int, world_size: int, output_rank: int
) -> None:
    """Ranks are numbered stage by stage; the last stage samples, its first rank answers."""
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)

    assert (parallel.world_size, parallel.output_rank) == (world_size, output_rank)


def test_settings_are_frozen_and_documented() -> None:
    """Nothing is written back into a setting."""
    model = ModelConfig(path="p", model_type="llama")
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.path = "q"  # type: ignore[misc]
    for kind in vars(config).values():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_buffers_that_no_machine_has_are_refused(name: str) -> None:
    """Before a worker tries to allocate them."""
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 1, name: 10**9}
    with pytest.raises(ConfigError, match=f"{name} must be from 1 to"):
        SchedulerConfig(**settings)
