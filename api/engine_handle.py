"""What an API server knows of one engine core. Kept by `engine_client`, read by `service`."""

from dataclasses import dataclass
from typing import Literal

from engine.wire import EngineReady, Heartbeat, Phase

EngineState = Literal["starting", "up", "hung", "dead", "lost"]
"""lost: gone, and its successor is not ready."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of one incarnation of an engine core that others outlive."""

    engine_index: int
    epoch: int
    """Which incarnation."""
    cause: str
    is_first: bool = False
    """Whoever tells is the first to see it, so its cause has yet to be logged as the first."""


@dataclass(slots=True)
class EngineHandle:
    """What the client knows of one engine core."""

    index: int
    """On the wire and in lists: engine cores of one server count from 0."""
    rank: int
    """In all that people read: ranks are counted over all servers."""
    identity: bytes | None = None
    ready: EngineReady | None = None
    last_seen: float = 0.0
    """Loop time of its last message."""
    heartbeat: Heartbeat | None = None
    state: EngineState = "starting"
    epoch: int = 0
    """Incarnations before this one have been given up: what they say is stale."""

    @property
    def name(self) -> str:
        """As people know it, from the titles of processes."""
        return f"engine core DP{self.rank}"

    def describe(self) -> str:
        """Where it was when last heard of, for post-mortems."""
        return self.last_seen_in or "no heartbeat yet"

    @property
    def last_seen_in(self) -> str:
        """The same; empty where it has not been heard of."""
        if self.heartbeat is None:
            return ""
        phase = Phase(self.heartbeat.phase).name
        return f"step {self.heartbeat.step}, {phase} for {self.heartbeat.age_ms / 1000:.1f} s"
