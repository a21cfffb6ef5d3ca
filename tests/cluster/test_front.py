"""The API server in the command's own process."""

import asyncio
import gc
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.config import ApiConfig
from api.engine_client import EngineClient
from cluster import front
from engine.lifecycle import StopFlag


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_the_heap_is_frozen_before_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection over all that was loaded takes tens of milliseconds, in the middle of
    everybody's stream."""
    frozen: list[int] = []

    def run(*args: Any, **_: Any) -> int:
        may_serve = args[5]
        asyncio.run(may_serve([]))
        return 0

    monkeypatch.setattr(front, "run_api_server", run)
    monkeypatch.setattr(front, "set_title", lambda title: None)
    client = cast(EngineClient, SimpleNamespace(ready_at=0.0))
    with socket.socket() as listener:
        server = front.OwnApiServer(
            ApiConfig(served_model_names=("m",)),
            listener,
            client,
            lambda ready, since_s: frozen.append(gc.get_freeze_count()),
        )
        server.run(lambda: Path(), StopFlag())

    assert frozen[0] > 10_000
