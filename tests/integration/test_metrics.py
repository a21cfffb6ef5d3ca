"""`/metrics` of several API servers behind one port: one whole picture, whichever answers."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream, completion_body

pytestmark = pytest.mark.slow

REQUEST_COUNTS = (
    "request_success_total",
    "requests_routed_total",
    "e2e_request_latency_seconds_count",
)

NUM_SCRAPES = 12
"""Each on a connection of its own: but once in two thousand times they reach both API servers."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("-dp", "2", "--served-model-name", "m")
    with running_server("scripted", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speaks for ever, at 50 tokens a second."""
    return make_slow_model(tmp_path_factory.mktemp("models"))


class Scrape:
    """What one scrape has told."""

    def __init__(self, server: Server, client: httpx.Client | None = None) -> None:
        with contextlib.ExitStack() as stack:
            answer = (client or stack.enter_context(server.http())).get("/metrics")
        assert answer.status_code == 200, answer.text
        self.samples = {
            name: float(value)
            for name, _, value in (
                line.rpartition(" ") for line in answer.text.splitlines() if line[0] != "#"
            )
        }

    def total(self, name: str, *labels: str) -> float:
        """The sum of all samples of this name with these labels, as they are printed."""
        return sum(
            value
            for sample, value in self.samples.items()
            if sample.partition("{")[0] == f"raywire:{name}" and all(x in sample for x in labels)
        )

    def counters(self) -> dict[str, float]:
        return {
            sample: value
            for sample, value in self.samples.items()
            if re.match(r"\w+:?\w*_(total|count|sum|bucket)\b", sample)
        }


def complete(server: Server, **headers: str) -> None:
    """On a connection of its own."""
    with server.http() as client:
        answer = client.post("/v1/completions", json=completion_body(), headers=headers)
    assert answer.status_code == 200, answer.text


@contextlib.contextmanager
def connected_to(server: Server, title: str) -> Iterator[httpx.Client]:
    """A client whose one connection has reached that API server, as the log tells."""
    while True:
        with server.http() as client:
            answer = client.post("/v1/completions", json=completion_body())
            line = rf"(APIServer_\d) .* request_id={answer.headers['x-request-id']}"
            if server.wait_for_log(line)[1] == title:
                yield client
                return


def who_answered(server: Server) -> set[str]:
    """API servers that have answered completions."""
    return set(re.findall(r"(APIServer_\d) pid=\d+ api.edge\] \"POST", server.log))


def test_every_scrape_shows_all_requests(server: Server) -> None:
    """Whoever answered them, and whoever is scraped: a counter is the same for all, and grows."""
    before = Scrape(server)
    for _ in range(16):
        complete(server)
    assert len(who_answered(server)) == 2, "one API server has answered them all"

    scrapes = [Scrape(server) for _ in range(NUM_SCRAPES)]

    for earlier, later in zip([before, *scrapes], scrapes, strict=False):
        for name in REQUEST_COUNTS:
            assert later.total(name) - before.total(name) == 16
        fallen = [name for name, was in earlier.counters().items() if later.samples[name] < was]
        assert not fallen
    cpu = [name for name in scrapes[0].samples if name.startswith("process_cpu_seconds_total")]
    assert cpu == [f'process_cpu_seconds_total{{api_server="{index}"}}' for index in (0, 1)]


def test_engine_cores_count_for_all(server: Server) -> None:
    """Looked up once, counted once, though both API servers may have heard of it."""
    before = Scrape(server)
    for _ in range(8):
        complete(server, **{"X-data-parallel-rank": "1"})

    scrapes = [Scrape(server) for _ in range(NUM_SCRAPES)]

    for scrape in scrapes:
        grown = {
            (name, rank): scrape.total(name, rank) - before.total(name, rank)
            for name in ("prefix_cache_queries_total", "prompt_tokens_total")
            for rank in ('engine="0"', 'engine="1"')
        }
        assert list(grown.values()) == [0, 8, 0, 8], grown  # prompts of one token
        assert scrape.total("requests_routed_total", 'engine="1"', 'rule="pinned"') == 8


def test_load_is_seen_by_whoever_is_scraped(slow_model: Path) -> None:
    """Requests that other API servers have sent; and an idle rank is idle again for all."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        streams = [BackgroundStream(server, max_tokens=400) for _ in range(3)]
        assert all(stream.started.wait(20) for stream in streams)

        def shows(num_running: int) -> bool:
            scrapes = [Scrape(server) for _ in range(NUM_SCRAPES)]
            return all(each.total("num_requests_running") == num_running for each in scrapes)

        wait_for(lambda: shows(3), "three running requests in all scrapes")
        for stream in streams:
            stream.join(60.0)
        wait_for(lambda: shows(0), "no running request in any scrape")


def test_who_hangs_counts_with_what_it_said_last(server: Server) -> None:
    """The other API server answers within seconds, and no counter falls."""
    age = 'raywire:api_server_metrics_age_seconds{api_server="1"}'
    pid = server.raywire_processes()["RAYWIRE::APIServer_1"].pid

    with connected_to(server, "APIServer_0") as client:
        before = Scrape(server)
        os.kill(pid, signal.SIGSTOP)
        try:
            during = Scrape(server, client)
        finally:
            os.kill(pid, signal.SIGCONT)

    assert during.total("request_success_total") == before.total("request_success_total")
    assert during.samples[age] > 0.9
    wait_for(lambda: Scrape(server).samples[age] < 0.5, "news of the API server that hung")


def test_who_has_ended_first_is_not_forgotten(slow_model: Path) -> None:
    """While one API server drains, the other's requests stay in what it shows."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        num_done = 0
        while len(who_answered(server)) < 2:
            complete(server)
            num_done += 1
        stream = BackgroundStream(server, max_tokens=400)
        assert stream.started.wait(20)
        server.signal(signal.SIGTERM)
        wait_for(lambda: len(server.raywire_processes()) == 6, "the idle one has ended")

        assert Scrape(server).total("request_success_total") == num_done
        stream.join(60.0)
