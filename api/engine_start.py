"""Who has to be heard of before an API server serves. Part of `engine_client`, on its loop.

All engine cores say READY. Where there is a coordinator, it has to have heard that as well, and we
have to have heard it. An API server that takes another's place is told of engine cores that serve
already (`introduced`): they will not say READY again, but they have to have found it. Lost ones are
not waited for, unless all are.
"""

import asyncio
from collections.abc import Sequence

from api.engine_handle import EngineHandle
from api.engine_registry import EngineRegistry
from api.engine_wire import EngineWire
from api.load_feed import LoadFeed
from api.request_stream import Wakeup
from engine.wire import EngineReady, RequestType

_RECONNECT_POLL_S = 0.05


class EngineStart:
    """The start of one API server.

    Args:
        registry: knows who has said READY.
        wire: what engine cores are sent over.
    """

    def __init__(self, registry: EngineRegistry, wire: EngineWire) -> None:
        self.changed = Wakeup()
        """Set whenever another engine core may have been heard of, or none will be any more."""
        self.introduced: list[EngineReady] | None = None
        """Engine cores that serve others already; None: we are among the first API servers."""
        self._registry = registry
        self._wire = wire

    def missing(self, feed: LoadFeed | None) -> list[EngineHandle]:
        """Engine cores that are waited for. `feed`: what the coordinator says, if there is one."""
        return (
            self._registry.missing()
            or self._without_any()
            or self._unreported(feed)
            or self._unreachable()
        )

    def why_late(self, missing: Sequence[EngineHandle], timeout_s: float) -> str:
        """In words: whose word is missing, and where they were last seen."""
        names = ", ".join(f"{e.name} ({e.describe()})" for e in missing)
        is_silent = self._registry.missing() or self._without_any()
        who = "no READY" if is_silent else "the coordinator has no READY"
        return f"{who} within {timeout_s:.0f} s from {names}"

    async def wait_for_change(self) -> None:
        """Wait until others may be missing."""
        if self.introduced is not None:
            await asyncio.sleep(_RECONNECT_POLL_S)
        else:
            await self.changed.wait()

    def _without_any(self) -> list[EngineHandle]:
        """All, where all that others knew are lost: the first to be back says what is served."""
        engines = self._registry.engines
        return [] if any(engine.ready for engine in engines) else list(engines)

    def _unreported(self, feed: LoadFeed | None) -> list[EngineHandle]:
        """Engine cores that are ready, but not connected to the coordinator, or we are not."""
        if feed is None:
            return []
        return [
            e
            for e in self._registry.engines
            if e.ready and not feed.has_heard_of(e.index, e.ready.epoch)
        ]

    def _unreachable(self) -> list[EngineHandle]:
        """Engine cores that were connected to the API server before us, and not yet to us. They
        find us within a second, and nobody tells of it but a message that can be sent."""
        indices = {ready.engine_index for ready in self.introduced or ()}
        return [
            e
            for e in self._registry.engines
            if e.index in indices
            and e.identity is not None
            and not self._wire.send(e.identity, RequestType.ABORT, list[str]())
        ]
