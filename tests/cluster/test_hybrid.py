"""How the command of a hybrid server ends. That servers run on nodes is in tests/integration."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from cluster import hybrid
from cluster.actors import End
from cluster.config import EngineOptions, ServeConfig
from cluster.ray_actors import Actor
from engine.lifecycle import StopFlag

CONFIG = ServeConfig(
    engine=EngineOptions(model="m", data_parallel_size=2),
    data_parallel_backend="ray",
    data_parallel_hybrid_lb=True,
    data_parallel_size_local=1,
    shutdown_timeout=0.0,
)


class StubbornRay:
    """A cluster whose actors end when they are killed, and not before. It notes the calls that come
    after its end: Ray itself would connect again for them."""

    def __init__(self) -> None:
        self.late_calls: list[str] = []
        self._is_over = False
        self._killed = threading.Event()

    def wait(
        self, calls: Sequence[str], num_returns: int, timeout: float | None = None
    ) -> tuple[list[str], list[str]]:
        self._note("wait")
        if self._killed.wait(timeout):
            return list(calls[:num_returns]), list(calls[num_returns:])
        return [], list(calls)

    def get(self, call: str) -> End:
        self._note("get")
        return End(exit_code=0)

    def kill(self, handle: Any) -> None:
        self._killed.set()

    def close(self) -> None:
        self._is_over = True

    def _note(self, name: str) -> None:
        if self._is_over:
            self.late_calls.append(name)


class Handle:
    """An actor that does not listen."""

    @property
    def stop(self) -> "Handle":
        return self

    def remote(self) -> None:
        pass


class Session:
    def __init__(self, ray: StubbornRay) -> None:
        self.ray = ray
        self.close = ray.close
        self.is_ours = True

    def end_within(self, timeout_s: float, end: Callable[[], None]) -> bool:
        end()
        return True


def test_nothing_is_asked_of_ray_after_the_end(monkeypatch: Any) -> None:
    """A watcher that still collects the ends of killed servers is waited for."""
    monkeypatch.setattr(hybrid, "_BEYOND_DRAIN_S", 0.0)
    ray = StubbornRay()
    servers = hybrid._NodeServers(CONFIG, [])
    ends = [f"end of {number}" for number in range(200)]

    def start() -> None:
        servers._lease._session = Session(ray)  # type: ignore[assignment]
        servers._actors = [
            Actor(kind="server", title="s", node="n", handle=Handle(), run=end) for end in ends
        ]

    monkeypatch.setattr(servers, "_start", start)
    servers.start()
    servers.close(StopFlag())

    for thread in threading.enumerate():
        if thread.name == "node-servers":
            thread.join(5)
    assert ray.late_calls == []
