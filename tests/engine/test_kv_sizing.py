"""How much fits, and what the operator is told when it does not."""

from typing import Any, Literal

import msgspec
import pytest

from engine.config import CacheConfig, ModelConfig
from engine.errors import ConfigError
from engine.kv_sizing import KVCacheSize, size_kv_cache
from engine.step import WorkerReport

MIB = 1 << 20


def report(rank: int = 0, *, budget: int = 16 * MIB, per_token: int = 1024) -> WorkerReport:
    return WorkerReport(rank, "float32", 1000, 4096, per_token, budget)


def size(
    *reports: WorkerReport, length: int | Literal["auto"] | None = None, **cache: Any
) -> KVCacheSize:
    model = ModelConfig(path="", model_type="llama", max_model_len=length)
    return size_kv_cache(reports or [report()], model, CacheConfig(**cache))


def test_the_tightest_rank_decides() -> None:
    """All ranks use the same block ids, so the least number of blocks counts."""
    found = size(report(0), report(1, budget=8 * MIB), report(2, per_token=512))
    assert found.num_blocks == 8 * MIB // (1024 * 16)


def test_blocks_are_as_the_attention_reads_them_best_unless_the_user_says() -> None:
    """What one rank needs, all get: they share the block ids."""
    reports = (report(0), msgspec.structs.replace(report(1), block_size=256))
    assert size().block_size == 16
    assert size(*reports).block_size == 256
    assert size(*reports).num_blocks == 16 * MIB // (1024 * 256)
    assert size(*reports, block_size=32).block_size == 32


def test_the_null_block_holds_no_tokens() -> None:
    """Tokens in all blocks are those in blocks that may be handed out."""
    assert size(num_gpu_blocks_override=301).num_tokens == 300 * 16


def test_the_models_own_length_is_the_default() -> None:
    """If memory holds it, nothing is said."""
    assert size().max_model_len == 4096


def test_auto_is_as_much_as_fits() -> None:
    """The model's length where it fits, else what the blocks hold."""
    assert size(length="auto").max_model_len == 4096
    assert size(report(budget=MIB), length="auto").max_model_len == 1024 - 16


@pytest.mark.row("F-41")
def test_a_length_that_does_not_fit_is_refused_with_the_numbers() -> None:
    """Needed, available, and the largest length that would fit: which then does fit."""
    with pytest.raises(ConfigError) as caught:
        size(report(0), report(1, budget=2 * MIB), kv_cache_memory_bytes=2 * MIB)
    message = str(caught.value)
    for part in ("4096 tokens", str(4112 * 1024), str(2 * MIB), "rank 1", "2032", "auto"):
        assert part in message
    assert size(report(1, budget=2 * MIB), length=2032).max_model_len == 2032


@pytest.mark.row("F-41")
def test_the_default_cache_shortens_the_length(caplog: pytest.LogCaptureFixture) -> None:
    """Told neither length nor memory, a server starts with what there is, and says so; but not
    with a length that is no use."""
    assert size(report(budget=2 * MIB)).max_model_len == 2032
    assert "max_model_len is 2032 instead of the model's 4096" in caplog.text
    with pytest.raises(ConfigError, match="auto"):
        size(report(budget=MIB))


def test_no_memory_at_all_is_refused() -> None:
    """Also with auto: a length of 0 serves nobody."""
    with pytest.raises(ConfigError, match="free memory"):
        size(report(budget=1024), length="auto")


@pytest.mark.parametrize("length", [0, -1, 4097])
def test_a_length_beyond_the_model_is_refused(length: int) -> None:
    """The model was not made for it."""
    with pytest.raises(ConfigError, match="from 1 to 4096"):
        size(length=length)


def test_an_override_decides_and_the_length_follows() -> None:
    """Exactly that many blocks; a length asked for must fit them."""
    found = size(num_gpu_blocks_override=11)
    assert (found.num_blocks, found.max_model_len) == (11, 160)
    with pytest.raises(ConfigError, match="holds 160 tokens"):
        size(length=161, num_gpu_blocks_override=11)
