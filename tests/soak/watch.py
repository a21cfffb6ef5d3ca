"""What a soak run knows of the server from outside: metrics, probes, processes."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from api.chaos import Process, processes_below

INTERVAL_S = 1.0
QUICK_S = 2.0
"""Within this time a probe is answered, whatever the load."""

_SAMPLE = re.compile(r"^(\w[\w:]*(?:\{.*\})?) (\S+)$")
_COUNTERS = ("_total", "_count", "_sum", "_bucket")

GAUGES = (
    "raywire:num_requests_running",
    "raywire:num_requests_waiting",
    "raywire:kv_cache_usage_perc",
)
"""They are zero when nobody asks for anything."""

Samples = dict[str, float]


def parse(text: str) -> Samples:
    """Name with labels -> value."""
    found = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            found[match[1]] = float(match[2])
    return found


def kind_of(sample: str) -> str:
    """`counter` or `gauge`, by its name. What counts a process's own life begins with it."""
    name = sample.partition("{")[0]
    return "counter" if name.endswith(_COUNTERS) and name.startswith("raywire:") else "gauge"


class Watch:
    """Looks at `/metrics` and the probes once a second, in a thread.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.last: Samples = {}
        self.shrunk: list[str] = []
        """Counters that have become less."""
        self.slowest_probe_s = 0.0
        """Of `/live` and `/health`, as long as nothing is wrong."""
        self.is_probing = True
        """False while a fault may hold probes up."""
        self.is_counting = True
        """False while one server ends and another begins."""
        self._client = httpx.Client(
            base_url=url,
            timeout=10.0,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(30.0)
        self._client.close()

    def forget(self) -> None:
        """Another server has begun, which counts from zero."""
        self.last, self.is_counting = {}, True

    def get(self, path: str) -> httpx.Response | None:
        """An answer over a connection of its own, so by any of the API servers; None if there is
        none."""
        with contextlib.suppress(httpx.TransportError):
            return self._client.get(path)
        return None

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            if self.is_counting:
                self._look()
            for path in ("/live", "/health"):
                began, was_probing = time.monotonic(), self.is_probing
                self.get(path)
                if was_probing and self.is_probing:
                    took_s = time.monotonic() - began
                    self.slowest_probe_s = max(self.slowest_probe_s, took_s)

    def _look(self) -> None:
        before, response = self.last, self.get("/metrics")
        if response is None or response.status_code != 200:
            return
        now = parse(response.text)
        if not self.is_counting or before is not self.last:
            return  # it may be another one's
        for sample, value in before.items():
            if kind_of(sample) == "counter" and now.get(sample, 0.0) < value:
                self.shrunk.append(f"{sample}: {value:g}, then {now.get(sample)}")
        self.last = now

    def busy_gauges(self) -> list[str]:
        """Gauges that are not zero, now."""
        response = self.get("/metrics")
        if response is None or response.status_code != 200:
            return ["no metrics"]
        return [
            f"{sample} {value:g}"
            for sample, value in parse(response.text).items()
            if sample.partition("{")[0] in GAUGES and value != 0
        ]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process takes."""

    rss_mb: float
    num_fds: int
    num_threads: int


def footprints(root_pid: int) -> dict[str, Footprint]:
    """Of the processes of a server, by title; one that has just ended is left out."""
    found = {}
    for process in processes_below(root_pid):
        with contextlib.suppress(OSError):
            found[process.title] = _footprint(process)
    return found


def _footprint(process: Process) -> Footprint:
    folder = Path(f"/proc/{process.pid}")
    status = dict(
        line.split(":\t", 1)
        for line in (folder / "status").read_text().splitlines()
        if ":\t" in line
    )
    return Footprint(
        rss_mb=int(status["VmRSS"].split()[0]) / 1024,
        num_fds=len(os.listdir(folder / "fd")),
        num_threads=int(status["Threads"]),
    )


RSS_SLACK = 1.05
RSS_SLACK_MB = 16.0
"""An interpreter's own heap breathes."""
FD_SLACK = 4
THREAD_SLACK = 2


def grown(before: Mapping[str, Footprint], after: Mapping[str, Footprint]) -> list[str]:
    """What has not come back to where it was."""
    found = []
    for title, was in before.items():
        if (now := after.get(title)) is None:
            found.append(f"{title} is not there any more")
            continue
        if now.rss_mb > was.rss_mb * RSS_SLACK + RSS_SLACK_MB:
            found.append(f"{title}: {was.rss_mb:.0f} MiB, then {now.rss_mb:.0f}")
        if now.num_fds > was.num_fds + FD_SLACK:
            found.append(f"{title}: {was.num_fds} file descriptors, then {now.num_fds}")
        if now.num_threads > was.num_threads + THREAD_SLACK:
            found.append(f"{title}: {was.num_threads} threads, then {now.num_threads}")
    return found
