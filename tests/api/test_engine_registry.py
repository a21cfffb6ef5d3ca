"""Which engine cores are up, as messages and times say: no sockets, no clock."""

from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.engine_registry import EngineRegistry
from api.engine_start import EngineStart
from api.engine_wire import EngineWire
from engine.errors import ConfigError, WireError
from engine.wire import EngineDead, EngineReady, Heartbeat, Phase, pack_identity
from tests.helpers.fake_engine import FINGERPRINT


def ready(index: int = 0, epoch: int = 0) -> EngineReady:
    return EngineReady(
        engine_index=index,
        epoch=epoch,
        max_model_len=100,
        num_gpu_blocks=8,
        block_size=16,
        kv_cache_size_tokens=128,
        dtype="float32",
        vocab_size=300,
        max_num_seqs=16,
        fingerprint=FINGERPRINT,
    )


def say_ready(registry: EngineRegistry, index: int = 0, epoch: int = 0, now: float = 0.0) -> bool:
    return registry.take_ready(pack_identity(index, epoch), ready(index, epoch), now)


def beat(age_ms: int = 0, epoch: int = 0) -> Heartbeat:
    return Heartbeat(0, epoch, 1, age_ms, Phase.EXECUTE)


@given(st.lists(st.integers(0, 5), min_size=1))
@pytest.mark.row("F-22")
def test_only_a_later_incarnation_is_news(epochs: list[int]) -> None:
    """Whatever comes in whatever order, the latest is the one that serves; the rest is counted."""
    registry = EngineRegistry(1)
    news = [say_ready(registry, epoch=epoch) for epoch in epochs]
    serving = registry.engines[0].ready

    assert serving is not None
    assert serving.epoch == max(epochs)
    assert sum(news) + registry.num_stale_messages == len(epochs)
    assert registry.sender(0, max(epochs)) is registry.engines[0]
    assert registry.sender(0, max(epochs) + 1) is None
    assert not registry.take_last_words(EngineDead("ENGINE_CORE_DEAD", 0, max(epochs) + 1, "?"))


@given(
    beats=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 400_000)), max_size=10),
    wait_s=st.floats(0, 30),
)
def test_a_core_hangs_when_it_is_silent_or_its_step_does_not_end(
    beats: list[tuple[float, int]], wait_s: float
) -> None:
    """Silence is counted from the last heartbeat; a step's age is what that one said."""
    registry = EngineRegistry(1, heartbeat_timeout_s=10.0, step_timeout_s=300.0)
    engine = registry.engines[0]
    now, age_ms = 100.0, 0
    assert registry.why_hung(engine, 1e9) is None  # not ready: the start's deadline holds
    say_ready(registry, now=now)
    for pause_s, age_ms in beats:
        now += pause_s
        registry.take_heartbeat(beat(age_ms), now)
    later = now + wait_s

    is_hung = later - now > 10.0 or age_ms > 310_000
    assert (registry.why_hung(engine, later) is not None) == is_hung
    registry.give_new_chance(later)
    assert (registry.why_hung(engine, later) is not None) == (age_ms > 310_000)


def test_nobody_speaks_for_another() -> None:
    """READY must be of the rank whose connection it came on, and of one that exists."""
    registry = EngineRegistry(2)
    for identity, message in (
        (pack_identity(0, 0), ready(1)),
        (pack_identity(0, 1), ready(0, epoch=0)),
        (pack_identity(2, 0), ready(2)),
    ):
        with pytest.raises(WireError, match="came from engine"):
            registry.take_ready(identity, message, 0.0)
    with pytest.raises(WireError, match="unknown engine 2"):
        registry.sender(2, 0)
    with pytest.raises(WireError, match="unknown engine 2"):
        registry.take_last_words(EngineDead("ENGINE_CORE_DEAD", 2, 0, "?"))
    assert [engine.index for engine in registry.missing()] == [0, 1]


@pytest.mark.row("F-22")
def test_a_core_that_differs_does_not_count_as_ready() -> None:
    """The others go on; the difference is in the error."""
    registry = EngineRegistry(2, first_rank=2)
    say_ready(registry)
    other = msgspec.structs.replace(FINGERPRINT, packages={"torch": "2.12"})
    different = msgspec.structs.replace(ready(1), fingerprint=other)
    with pytest.raises(ConfigError, match="engine core DP3 differs from engine core DP2: torch"):
        registry.take_ready(pack_identity(1, 0), different, 0.0)
    assert [engine.index for engine in registry.missing()] == [1]


@pytest.mark.row("F-22")
def test_cores_that_are_like_each_other_must_be_like_the_command_too() -> None:
    """Text is made where it runs: another tokenizer there would make rubbish of every answer."""
    registry = EngineRegistry(2)
    registry.expected = msgspec.structs.replace(FINGERPRINT, tokenizer="ours")
    for index in range(2):
        words = (
            f"engine core DP{index} differs from the command: tokenizer tokenizer instead of ours"
        )
        with pytest.raises(ConfigError, match=words):
            registry.take_ready(pack_identity(index, 0), ready(index), 0.0)
    registry.expected = FINGERPRINT
    assert registry.take_ready(pack_identity(0, 0), ready(0), 0.0)


def test_who_comes_while_all_are_lost_waits_for_the_first_that_is_back() -> None:
    """Nobody else knows what is served; of others that are lost it need not wait."""
    registry = EngineRegistry(2)
    start = EngineStart(registry, cast(EngineWire, None))
    start.introduced = []
    for index in (0, 1):
        registry.give_up(index, 0)
    assert start.missing(None) == registry.engines
    assert start.why_late(registry.engines, 1.0).startswith("no READY within 1 s from ")

    say_ready(registry, index=1, epoch=1)
    assert start.missing(None) == []


@pytest.mark.row("F-22")
def test_a_second_ready_is_no_reason_to_end_a_rank() -> None:
    """An API server that takes another's place is told of ranks whose READY is still on its way to
    it. Only earlier incarnations are to be fenced."""
    stale: list[tuple[int, int]] = []
    registry = EngineRegistry(1)
    registry.on_stale = lambda index, epoch: stale.append((index, epoch))
    assert say_ready(registry, epoch=3)
    assert not say_ready(registry, epoch=3)
    assert stale == []
    assert not say_ready(registry, epoch=2)
    assert stale == [(0, 2)]
