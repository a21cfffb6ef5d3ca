"""A real API server (uvicorn, real sockets) in a thread, with a fake engine core behind it."""

import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from api.config import ApiConfig
from api.engine_client import EngineClient
from api.process import run
from engine.lifecycle import StopFlag
from tests.helpers import byte_folder
from tests.helpers.fake_engine import Answer, FakeEngine, prompt_as_answer
from tests.helpers.wires import ipc_wires

TIMEOUT_S = 20.0


def wait_for(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


class HttpServer:
    """A running server. `http` is a client of it."""

    def __init__(
        self, port: int, engines: list[FakeEngine], client: EngineClient, stop: StopFlag
    ) -> None:
        self.port = port
        self.engines = engines
        self.engine = engines[0]
        self.client = client
        self.stop = stop
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S)

    def wait_ready(self) -> None:
        wait_for(self._is_ready, "readiness")

    def _is_ready(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.http.get("/ready").status_code == 200

    def wait_idle(self) -> None:
        wait_for(lambda: not self.engine.running, "an idle engine")

    def join(self) -> int | None:
        """Wait until the server has ended; its exit code."""
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "the server has not ended"
        if self.error is not None:
            raise self.error
        return self.exit_code

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "m", **fields})

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.http.post(
            "/v1/chat/completions", json={"model": "m", "messages": messages, **fields}
        )

    def metric(self, sample: str) -> float:
        """The value of one sample of /metrics, by its name and labels as printed."""
        for line in self.http.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        raise AssertionError(f"no sample {sample}")


def events(response: httpx.Response) -> list[Any]:
    """The JSON of all events of a stream. Checks that `[DONE]` is the last one, if there."""
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    assert "[DONE]" not in data[:-1]
    return [json.loads(each) for each in data if each != "[DONE]"]


@contextlib.contextmanager
def serving(
    answer: Answer = prompt_as_answer,
    *,
    waits_until_ready: bool = True,
    start: Callable[[Path], Path] = lambda folder: folder,
    heartbeat_timeout_s: float = 10.0,
    engine_options: dict[str, Any] | None = None,
    num_engines: int = 1,
    began: Callable[[], float] = time.monotonic,
    **config: Any,
) -> Iterator[HttpServer]:
    """Run a server with fake engine cores, usually one, while the block runs."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raywire-test-")))
        wires = ipc_wires(folder)
        model = byte_folder.make(folder / "model")
        engines = [
            stack.enter_context(FakeEngine(wires, answer, index=index, **engine_options or {}))
            for index in range(num_engines)
        ]
        client = EngineClient(num_engines, heartbeat_timeout_s=heartbeat_timeout_s)
        stop = StopFlag()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = HttpServer(listener.getsockname()[1], engines, client, stop)
        settings = ApiConfig(**{"served_model_names": ("m", "alias"), **config})

        def bind_and_start() -> Path:
            client.bind(wires)
            return start(model)

        def serve() -> None:
            try:
                server.exit_code = run(
                    settings, listener, client, bind_and_start, stop, began=began
                )
            except BaseException as error:  # noqa: BLE001  # `join` raises it in the test
                server.error = error

        server.thread = threading.Thread(target=serve, name="server", daemon=True)
        server.thread.start()
        try:
            if waits_until_ready:
                server.wait_ready()
            yield server
        finally:
            stop.set()
            stop.set()  # a second signal: at once
            server.http.close()
            server.thread.join(TIMEOUT_S)
            assert not server.thread.is_alive(), "the server has not ended"
