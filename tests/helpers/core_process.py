"""A real engine process with a fake executor, and API servers' sockets to talk to it."""

import contextlib
import functools
import multiprocessing
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any

from engine import process
from engine.config import EngineConfig, ModelConfig, WireConfig
from engine.curve import CurveKeys
from engine.executor import StartExecutor
from tests.helpers.api_peer import ApiPeer, socket_folder
from tests.helpers.fake_executor import start_fake

TIMEOUT_S = 20.0


@dataclass
class CoreUnderTest:
    """An engine process and its API servers' sockets."""

    process: BaseProcess
    peers: list[ApiPeer]

    @property
    def api(self) -> ApiPeer:
        return self.peers[0]

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def exit_code(self) -> int | None:
        """Wait until the process has ended."""
        self.process.join(TIMEOUT_S)
        return self.process.exitcode


@contextlib.contextmanager
def run_core(
    *,
    num_api_servers: int = 1,
    heartbeat_interval_s: float = 0.05,
    is_ready: bool = True,
    start_executor: StartExecutor | None = None,
    wire: dict[str, Any] | None = None,
    **fake: Any,
) -> Iterator[CoreUnderTest]:
    """Start an engine process, wait for READY (unless `is_ready` is False), and end it for sure.

    Without `start_executor`, a FakeExecutor with the settings `fake` takes the workers' place.
    `wire` are fields of its WireConfig that shall be different.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        peers = [stack.enter_context(ApiPeer(folder, i)) for i in range(num_api_servers)]
        config = make_config(peers, heartbeat_interval_s)
        config = replace(config, wire=replace(config.wire, **wire or {}))
        started = start_process(config, start_executor, **fake)
        stack.callback(_end, started)
        if is_ready:
            for peer in peers:
                peer.wait_ready()
        yield CoreUnderTest(started, peers)


def make_config(peers: list[ApiPeer], heartbeat_interval_s: float = 0.05) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=os.devnull, model_type="scripted"),
        wire=WireConfig(
            request_addresses=tuple(peer.request_address for peer in peers),
            output_addresses=tuple(peer.output_address for peer in peers),
            epoch=3,
            heartbeat_interval_s=heartbeat_interval_s,
        ),
    )


def start_process(
    config: EngineConfig,
    start_executor: StartExecutor | None = None,
    keys: CurveKeys | None = None,
    **fake: Any,
) -> BaseProcess:
    started = multiprocessing.get_context("spawn").Process(
        target=process.main,
        args=(config, start_executor or functools.partial(start_fake, **fake), keys),
    )
    with empty_main_module():
        started.start()
    return started


@contextlib.contextmanager
def empty_main_module() -> Iterator[None]:
    """A spawned process imports its parent's main module, and pytest takes long to import."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _end(started: BaseProcess) -> None:
    started.kill()
    started.join(TIMEOUT_S)
    started.close()
