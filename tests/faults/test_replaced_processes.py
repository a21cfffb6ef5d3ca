"""--on-engine-death replace: an API server or the coordinator that dies is replaced as well, and
costs others nothing."""

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream, completion_body, metric

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FREED_S = 2.0
"""Engine cores have aborted by then what a dead API server has sent."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Two ranks and two API servers, of a model that says what it was told."""
    model = make_scripted_model(tmp_path, kind="echo", step_delay_s=0.02)
    flags = ("-dp", "2", "--on-engine-death", "replace", "--served-model-name", "m")
    with running_server(str(model), *flags) as server:
        yield server


def letters(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=count))


def start_streams(server: Server, count: int, length: int) -> list[BackgroundStream]:
    streams = [
        BackgroundStream(server, prompt=letters(seed, length), max_tokens=length + 1)
        for seed in range(count)
    ]
    assert all(stream.started.wait(20) for stream in streams)
    return streams


def kill(server: Server, title: str, signum: signal.Signals = signal.SIGKILL) -> int:
    pid = server.raywire_processes()[f"RAYWIRE::{title}"].pid
    os.kill(pid, signum)
    return pid


def num_running(server: Server) -> float:
    return sum(metric(server, "raywire:num_requests_running", engine=rank) for rank in "01")


def num_stopped(server: Server) -> float:
    """Requests that have ended, on whichever rank: while streams are uneven, one gets them all."""
    name = "raywire:request_success_total"
    return sum(metric(server, name, engine=rank, finished_reason="stop") for rank in "01")


def serve_until_back(server: Server, title: str) -> None:
    """Every new request is answered meanwhile."""

    def is_back() -> bool:
        with server.http() as client:
            answer = client.post("/v1/completions", json=completion_body(prompt="hi"))
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hi")
        return f"{title} is back; 2 of 2 answer" in server.log

    wait_for(is_back, f"{title} is back:\n{server.log}", 90)


def assert_one_first_cause(server: Server, *words: str) -> None:
    [cause] = re.findall("^ERROR .*first cause:.*$", server.log, re.MULTILINE)
    assert all(word in cause for word in words)


@pytest.mark.row("F-07")
def test_an_api_server_that_dies_is_replaced(server: Server) -> None:
    """Its own clients' connections break, nobody else notices; engine cores abort what it had
    sent; the new one takes its share of the requests; counters do not fall."""
    before = num_stopped(server)
    serve_once = completion_body(prompt="hi")
    with server.http() as client:
        assert client.post("/v1/completions", json=serve_once).status_code == 200
    streams = start_streams(server, 8, 2000)
    pid = kill(server, "APIServer_1")
    server.wait_for_log(r"aborted num_requests=\d+ of APIServer_1", FREED_S)
    broken = [s for s in streams if s.joined_within(0.5)]
    assert 0 < len(broken) < len(streams)  # the kernel spreads connections by their ports
    assert all(stream.failure is not None for stream in broken)
    num_left = len(streams) - len(broken)
    wait_for(lambda: num_running(server) == num_left, "its requests are gone")

    serve_until_back(server, "APIServer_1")
    assert_one_first_cause(server, f"APIServer_1 pid={pid}", "SIGKILL")
    for _ in range(40):
        with server.http() as client:
            assert client.post("/v1/completions", json=serve_once).status_code == 200
        assert num_stopped(server) > before
    new = server.raywire_processes()["RAYWIRE::APIServer_1"].pid
    assert re.search(rf"APIServer_1 pid={new} api.edge\] \"POST", server.log)
    assert all(stream.failure is None for stream in streams if stream not in broken)


@pytest.mark.row("F-09")
def test_a_coordinator_that_dies_is_replaced(server: Server) -> None:
    """Streams do not notice. The new one knows the ranks from their heartbeats, the idle ones too:
    an API server that comes later is connected to all of them."""
    streams = start_streams(server, 4, 150)
    old = kill(server, "DPCoordinator")
    for stream in streams:
        stream.join(60)
        assert (stream.failure, stream.errors) == (None, [])
    assert [stream.text for stream in streams] == [letters(seed, 150) for seed in range(4)]
    server.wait_for_log("the coordinator is replaced")
    wait_for(lambda: "RAYWIRE::DPCoordinator" in server.raywire_processes(), "a new one")
    assert_one_first_cause(server, f"DPCoordinator pid={old}", "SIGKILL")

    kill(server, "APIServer_0")
    serve_until_back(server, "APIServer_0")


@pytest.mark.row("F-04")
def test_an_api_server_that_comes_while_a_rank_is_lost(server: Server) -> None:
    """Both die at once: the new API server serves with the rank that is there, and later with
    both."""
    kill(server, "EngineCore_DP1")
    kill(server, "APIServer_1")
    server.wait_for_log("APIServer_1 is back")
    server.wait_for_log("engine core DP1 is back under epoch 1")
    for rank in "01" * 10:
        with server.http() as client:
            answer = client.post(
                "/v1/completions",
                json=completion_body(prompt="hi"),
                headers={"X-data-parallel-rank": rank},
            )
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hi")


def test_an_api_server_that_hangs_is_replaced(server: Server) -> None:
    """Its event loop does not turn for 10 s; one first cause."""
    kill(server, "APIServer_1", signal.SIGSTOP)
    server.wait_for_log("APIServer_1 is back", 60)
    assert_one_first_cause(server, "APIServer_1", "hung")
