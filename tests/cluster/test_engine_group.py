"""What an engine core that takes another's place is told."""

from cluster.engine_group import successor
from engine.config import CacheConfig, EngineConfig, ModelConfig, WireConfig
from engine.kv_sizing import size_kv_cache
from engine.step import WorkerReport
from engine.wire import EngineReady
from tests.helpers.fake_engine import FINGERPRINT

FIRST = EngineConfig(
    model=ModelConfig(path="m", model_type="llama"),
    wire=WireConfig(request_addresses=("a",), output_addresses=("b",)),
    cache=CacheConfig(block_size=16),
)


def ready(num_gpu_blocks: int, max_model_len: int) -> EngineReady:
    return EngineReady(
        engine_index=0,
        epoch=0,
        max_model_len=max_model_len,
        num_gpu_blocks=num_gpu_blocks,
        block_size=16,
        kv_cache_size_tokens=(num_gpu_blocks - 1) * 16,
        dtype="float32",
        vocab_size=100,
        max_num_seqs=8,
        fingerprint=FINGERPRINT,
    )


def test_it_has_the_cache_and_the_length_of_the_first() -> None:
    """However much memory is free by now: requests that were accepted fit."""
    config = successor(FIRST, 3, ready(65, 1000))
    report = WorkerReport(
        rank=0,
        dtype="float32",
        vocab_size=100,
        model_max_len=4096,
        kv_bytes_per_token=64,
        kv_budget_bytes=64 * 16 * 5,  # less than half of what there was
        block_size=16,
    )
    size = size_kv_cache([report], config.model, config.cache)

    assert (size.num_blocks, size.max_model_len) == (65, 1000)
    assert config.wire.epoch == 3
    assert config.wire.request_addresses == FIRST.wire.request_addresses


def test_one_whose_first_was_never_ready_sizes_itself() -> None:
    config = successor(FIRST, 1, None)

    assert config.cache == FIRST.cache
    assert config.model == FIRST.model
    assert config.wire.epoch == 1
