"""Reads server-sent events of a running server, as a client does."""

import itertools
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import httpx

from tests.helpers.server import wait_for


class Answering(Protocol):
    """A running server, wherever it is."""

    def http(self) -> httpx.Client: ...


def completion_body(**fields: object) -> dict[str, Any]:
    """A completion of the model called `m`."""
    return {"model": "m", "prompt": "x", "max_tokens": 8, "temperature": 0, **fields}


def read_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, without the `[DONE]` at its end."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def metric(server: Answering, name: str, **labels: str) -> float:
    """The value of one sample of /metrics; 0 if there is none. Labels not given do not matter."""
    with server.http() as client:
        for line in client.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(
                f'{label}="{text}"' in sample for label, text in labels.items()
            ):
                return float(value)
    return 0.0


def wait_for_running(server: Answering, count: int) -> None:
    """Wait until that many requests are in the engine's running batch."""
    wait_for(
        lambda: metric(server, "raywire:num_requests_running") == count,
        f"{count} running requests",
    )


class BackgroundStream:
    """A streamed completion, read in a thread until its end.

    `started` is set with the first token, at `started_at`; after `join`, `events` has everything
    that came.
    """

    def __init__(
        self, server: Answering, headers: Mapping[str, str] | None = None, **fields: object
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.arrived_at: list[float] = []
        """Of each event, `time.monotonic()`."""
        self.status: int | None = None
        self.started = threading.Event()
        self.started_at = math.inf
        """`time.monotonic()`."""
        self.failure: Exception | None = None
        """The connection broke, instead of ending as a stream should."""
        self._server = server
        self._headers = dict(headers or {})
        self._body = completion_body(stream=True, **fields)
        self._thread = threading.Thread(target=self._read, name="stream", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float = 20.0) -> None:
        """Wait for the end of the stream."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream has not ended: {self.events[-3:]}"

    def joined_within(self, timeout_s: float) -> bool:
        """Whether the stream has ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def text(self) -> str:
        return "".join(e["choices"][0]["text"] for e in self.events if e.get("choices"))

    @property
    def finish_reasons(self) -> list[str]:
        """Of all events: a stream that ended well has exactly one."""
        return [
            choice["finish_reason"]
            for event in self.events
            for choice in event.get("choices", [])
            if choice.get("finish_reason")
        ]

    @property
    def longest_gap_s(self) -> float:
        """Between two events."""
        return max(b - a for a, b in itertools.pairwise(self.arrived_at))

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]

    def _read(self) -> None:
        try:
            with (
                self._server.http() as client,
                client.stream(
                    "POST", "/v1/completions", json=self._body, headers=self._headers
                ) as response,
            ):
                self.status = response.status_code
                for event in read_events(response):
                    self.events.append(event)
                    self.arrived_at.append(time.monotonic())
                    if not self.started.is_set():
                        self.started_at = time.monotonic()
                        self.started.set()
        except httpx.TransportError as error:
            self.failure = error
        finally:
            self.started.set()
