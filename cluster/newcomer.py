"""What an API server has to be told that takes the place of one which has died: what all others
have learned since the start, in one `Begin`. Kept by `api_servers`."""

import threading
from collections.abc import Sequence
from pathlib import Path

from cluster.channel import Allow, Begin, Channel
from cluster.deadline import Deadline
from engine.bound import ServerWires
from engine.config import CoordinatorAddresses
from engine.wire import EngineReady, Fingerprint


class Memory:
    """All methods are for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wires: Sequence[ServerWires] = ()
        self._begin: Begin | None = None
        self._keys: list[bytes] = []
        self._ready: dict[int, EngineReady] = {}
        self._epochs: dict[int, int] = {}
        """The lowest that counts, by engine core; 0 unless one has been lost."""

    def keep(self, wires: Sequence[ServerWires]) -> None:
        """Sockets that are bound stay open here, or nobody could serve them again."""
        self._wires = wires

    def begin(
        self,
        model_folder: Path,
        coordinator: CoordinatorAddresses | None,
        deadline: Deadline,
        expected: Fingerprint | None,
    ) -> Begin:
        """What the first API servers are told."""
        self._begin = Begin(str(model_folder), coordinator, deadline.began_s, expected)
        return self._begin

    def allow(self, public_keys: Sequence[bytes]) -> None:
        with self._lock:
            self._keys += public_keys

    def take_ready(self, ready: EngineReady) -> None:
        with self._lock:
            if ready.epoch >= self._epochs.get(ready.engine_index, 0):
                self._ready[ready.engine_index] = ready

    def take_loss(self, engine_index: int, epoch: int) -> None:
        with self._lock:
            self._epochs[engine_index] = max(epoch + 1, self._epochs.get(engine_index, 0))
            ready = self._ready.get(engine_index)
            if ready is not None and ready.epoch <= epoch:
                del self._ready[engine_index]

    def tell(self, channel: Channel, client_index: int, now: float) -> None:
        """All that one of that index has to know, from its start at `now` on."""
        assert self._begin is not None
        channel.send_wires(self._wires[client_index])
        with self._lock:
            channel.send(Allow(list(self._keys)))
            channel.send(
                Begin(
                    self._begin.model_folder,
                    self._begin.coordinator,
                    now,
                    self._begin.expected,
                    list(self._ready.values()),
                    dict(self._epochs),
                )
            )

    def close(self) -> None:
        for wires in self._wires:
            wires.close()
