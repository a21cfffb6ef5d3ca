"""The server of a soak run: at one address, and started again whenever it has ended, as a
supervisor would."""

import contextlib
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import httpx

from api.chaos import Process, processes_below
from tests.helpers.server import Server, running_server, wait_for

START_S = 300.0
"""The first start converts the model, and builds kernels."""

FIRST_CAUSE = re.compile(r"^.*first cause: .*$", re.MULTILINE)


class Service:
    """Starts with the block, ends with it in order, and leaves nothing: `running_server` looks.

    Args:
        model: what to serve.
        flags: of `raywire serve`.
        env: more environment variables.
        log_folder: gets a copy of the log of each server that has ended.
    """

    def __init__(
        self, model: str, flags: tuple[str, ...], env: Mapping[str, str], log_folder: Path
    ) -> None:
        self._model = model
        self._flags = flags
        self._env = env
        self._log_folder = log_folder
        self._stack = contextlib.ExitStack()
        self._port = 0
        self.server: Server
        self.num_starts = 0

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        log_path = self._log_folder / f"server-{self.num_starts}.log"
        with contextlib.suppress(OSError):
            shutil.copy(self.server.log_path, log_path)
        self._stack.__exit__(kind, error, traceback)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it; after the first time at the address that it had."""
        flags = ("--port", str(self._port), *self._flags)
        # A command that is killed cannot tidy up; the next start does.
        self.server = self._stack.enter_context(
            running_server(self._model, *flags, env=self._env, is_ready_awaited=False)
        )
        self.num_starts += 1
        self.server.wait_ready(START_S)
        self._port = self.server.port

    def start_again(self) -> None:
        """It has ended: look that nothing is left of it, and start another one."""
        self.server.assert_gone()
        shutil.copy(self.server.log_path, self._log_folder / f"server-{self.num_starts}.log")
        self._stack.close()
        self.start()

    def processes(self) -> list[Process]:
        return processes_below(self.server.process.pid)

    def first_causes(self) -> list[str]:
        return FIRST_CAUSE.findall(self.server.log)

    def is_whole(self, titles: set[str]) -> bool:
        """Whether it is ready, with nothing missing."""
        if {process.title for process in self.processes()} != titles:
            return False
        try:
            ready = httpx.get(f"{self.url}/ready", timeout=5.0, trust_env=False)
        except httpx.TransportError:
            return False
        ranks = ready.json().get("ranks", {})
        return ready.status_code == 200 and ranks.get("up") == ranks.get("all")

    def wait_whole(self, titles: set[str], timeout_s: float) -> float:
        """Wait until it is, and return when."""
        wait_for(
            lambda: self.is_whole(titles),
            f"all of {sorted(titles)}; there are {self.processes()}",
            timeout_s,
            interval_s=0.1,
        )
        return time.monotonic()
