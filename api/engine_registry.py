"""Which engine cores there are, and whether each is up, as an API server hears it. Pure: messages
and times in, judgements out.

They say READY and then send heartbeats, and both carry the epoch of the incarnation that speaks. A
core that hangs is a dead core: one whose heartbeats stop, or whose step takes longer than any step
may. One that has been given up stays so: what its incarnation says is stale, whatever it is. Used
by `engine_client`, which acts on it.
"""

import logging
from collections.abc import Callable

from api.engine_handle import EngineHandle
from engine.errors import ConfigError, WireError
from engine.fingerprint import differences
from engine.wire import EngineDead, EngineReady, Fingerprint, Heartbeat, unpack_identity

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 10.0
"""Silence of an engine core after which it counts as hung: ten heartbeats."""

STEP_MARGIN_S = 10.0
"""A step that is older than its timeout by this much has hung: the executor, which knows the guilty
worker, had its chance to name it."""


class EngineRegistry:
    """The engine cores of one server. Times are of any one clock that does not jump.

    Args:
        num_engines: engine cores of this server.
        heartbeat_timeout_s: silence after which an engine core counts as hung.
        step_timeout_s: the executors' own limit of a step.
        first_rank: data-parallel rank of the first one.
    """

    def __init__(
        self,
        num_engines: int,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        step_timeout_s: float = 300.0,
        first_rank: int = 0,
    ) -> None:
        self.engines = [EngineHandle(i, first_rank + i) for i in range(num_engines)]
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.step_limit_s = step_timeout_s + STEP_MARGIN_S
        self.num_stale_messages = 0
        """Messages of incarnations that have been replaced, dropped."""
        self.on_stale: Callable[[int, int], None] = lambda index, epoch: None
        """Called with whose they were."""
        self.expected: Fingerprint | None = None
        """What engine cores must be like; None: like each other."""

    def missing(self) -> list[EngineHandle]:
        """Those that have not said READY, and are not known to be lost."""
        return [each for each in self.engines if each.ready is None and each.state != "lost"]

    def take_ready(self, identity: bytes, ready: EngineReady, now: float) -> bool:
        """Take note of a core that is ready. Returns False where that is no news.

        Raises:
            WireError: it is not who it says.
            ConfigError: it differs from us or the others; the difference is spelled out.
        """
        index, epoch = unpack_identity(identity)
        if (ready.engine_index, ready.epoch) != (index, epoch) or index >= len(self.engines):
            raise WireError(f"READY of engine {ready.engine_index} came from engine {index}")
        engine = self.engines[index]
        if engine.ready is not None and engine.ready.epoch == epoch:
            self.num_stale_messages += 1  # said twice, or we were told of it before: it may go on
            return False
        if epoch < engine.epoch:
            self._drop_stale(index, epoch)
            return False
        if difference := self._difference(engine, ready.fingerprint):
            raise ConfigError(difference)
        engine.identity, engine.ready, engine.epoch = identity, ready, epoch
        engine.state = "up"
        engine.heartbeat = None  # how long it has been loading is no step's age
        engine.last_seen = now
        logger.info(
            "engine core is ready rank=%d epoch=%d max_model_len=%d num_gpu_blocks=%d"
            " kv_cache_size_tokens=%d load_s=%.1f",
            engine.rank,
            epoch,
            ready.max_model_len,
            ready.num_gpu_blocks,
            ready.kv_cache_size_tokens,
            ready.load_s,
        )
        return True

    def take_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Also while a core loads: the start timeout tells where it was."""
        engine = self.sender(heartbeat.engine_index, heartbeat.epoch)
        if engine is not None:
            engine.last_seen = now
            engine.heartbeat = heartbeat

    def take_last_words(self, dead: EngineDead) -> bool:
        """Whether they are of the incarnation that serves."""
        if dead.engine_index >= len(self.engines):
            raise WireError(f"last words of unknown engine {dead.engine_index}")
        return self.sender(dead.engine_index, dead.epoch) is not None

    def sender(self, index: int, epoch: int) -> EngineHandle | None:
        """The engine core a message came from, or None if it is to be dropped."""
        if index >= len(self.engines):
            raise WireError(f"a message of unknown engine {index}")
        engine = self.engines[index]
        if epoch < engine.epoch or (engine.ready is not None and engine.ready.epoch != epoch):
            self._drop_stale(index, epoch)
            return None
        return engine

    def give_up(self, index: int, epoch: int) -> bool:
        """From now on that incarnation is stale, and all before it. Returns False where that is no
        news."""
        engine = self.engines[index]
        if epoch < engine.epoch:
            return False
        engine.epoch = epoch + 1
        engine.identity = engine.ready = engine.heartbeat = None
        engine.state = "lost"
        return True

    def give_new_chance(self, now: float) -> None:
        """Whoever listens was stopped or starved itself: nobody's silence counts so far."""
        for engine in self.engines:
            engine.last_seen = now

    def why_hung(self, engine: EngineHandle, now: float) -> str | None:
        if engine.ready is None:
            return None
        silence_s = now - engine.last_seen
        if silence_s > self.heartbeat_timeout_s:
            return f"hung: no heartbeat for {silence_s:.1f} s; last seen in {engine.describe()}"
        if engine.heartbeat and engine.heartbeat.age_ms > self.step_limit_s * 1000:
            return f"hung: no progress; last seen in {engine.describe()}"
        return None

    def _drop_stale(self, index: int, epoch: int) -> None:
        self.num_stale_messages += 1
        self.on_stale(index, epoch)

    def _difference(self, engine: EngineHandle, fingerprint: Fingerprint) -> str | None:
        ours = self.expected
        if ours is not None and (parts := differences(ours, fingerprint)):
            return f"{engine.name} differs from the command: {'; '.join(parts)}"
        for other in self.engines:
            if other is engine or other.ready is None:
                continue
            if parts := differences(other.ready.fingerprint, fingerprint):
                return f"{engine.name} differs from {other.name}: {'; '.join(parts)}"
        return None
