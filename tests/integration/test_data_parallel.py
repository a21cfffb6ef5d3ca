"""Data parallelism with child processes: several engine cores and API servers behind one port."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.plan import Topology
from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream, completion_body, metric
from tests.helpers.tiny_models import tiny_model

NOTICED_S = 2.0
"""A death is in the log by then,"""

END_S = 5.0
"""and all processes are gone."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("scripted", "-dp", "2", "--served-model-name", "m") as server:
        yield server


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speaks for ever, at 50 tokens a second."""
    return make_slow_model(tmp_path_factory.mktemp("models"))


def route(server: Server, **headers: str) -> dict[str, str]:
    """Where a completion went, as its answer says. Each call is a connection of its own, and so
    goes to any of the API servers."""
    with server.http() as client:
        answer = client.post("/v1/completions", json=completion_body(), headers=headers)
    assert answer.status_code == 200, answer.text
    parts = (part.partition("=") for part in answer.headers["x-raywire-route"].split("; "))
    return {name: value for name, _, value in parts}


def test_two_ranks_are_seven_processes(server: Server) -> None:
    """Two API servers, two engine cores, two workers and the coordinator, as the plan says; the
    command supervises and is not counted."""
    topology = Topology(data_parallel_size=2)
    assert sorted(server.raywire_processes()) == sorted(topology.titles())
    assert len(server.raywire_processes()) == topology.num_processes == 7


def test_requests_are_spread_over_ranks_and_api_servers(server: Server) -> None:
    """Both of both have their part."""
    routes = [route(server) for _ in range(12)]

    assert {each["rank"] for each in routes} == {"0", "1"}
    api_servers = set(re.findall(r"(APIServer_\d) pid=\d+ api.edge\] \"POST", server.log))
    assert api_servers == {"APIServer_0", "APIServer_1"}


def test_metrics_are_whole_whoever_is_scraped(server: Server) -> None:
    """All requests are in every answer, whichever API server has served them; more of it in
    `test_metrics.py`."""

    def count() -> float:
        name = "raywire:e2e_request_latency_seconds_count"
        return sum(metric(server, name, engine=rank) for rank in ("0", "1"))

    before = count()
    for _ in range(8):
        route(server)
    assert {count() for _ in range(6)} == {before + 8}


def test_a_client_can_choose_the_rank(server: Server) -> None:
    """By a header; a rank that does not exist is a 400 that says what there is."""
    assert [route(server, **{"X-data-parallel-rank": str(rank)})["rank"] for rank in (1, 0, 1)] == [
        "1",
        "0",
        "1",
    ]
    with server.http() as client:
        headers = {"X-data-parallel-rank": "2"}
        answer = client.post("/v1/completions", json=completion_body(), headers=headers)
    assert answer.status_code == 400
    assert "0 to 1" in answer.json()["error"]["message"]


def test_a_session_stays_on_its_rank(server: Server) -> None:
    """While ranks are equally busy, and as far as one API server knows of it."""
    with server.http() as client:  # one connection, one API server
        ranks = {
            client.post(
                "/v1/completions",
                json=completion_body(prompt=f"question {i}"),
                headers={"X-Session-ID": "s"},
            ).headers["x-raywire-route"][:6]
            for i in range(6)
        }
    assert len(ranks) == 1


def test_nothing_listens_but_the_http_port(server: Server) -> None:
    """All wires of one node are ipc, and their names are gone once everybody is connected."""
    assert {port for _, port in server.listeners()} == {server.port}
    assert not list(server.folder.glob("raywire-*"))


def test_an_idle_server_is_asleep(server: Server) -> None:
    """Seven processes and their heartbeats: under 4% of a core."""
    route(server)
    assert server.cpu_share(seconds=3) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("APIServer_1", ("API server", "APIServer_1", "SIGKILL")),
        ("EngineCore_DP1", ("engine core", "EngineCore_DP1", "SIGKILL")),
        ("DPCoordinator", ("coordinator", "DPCoordinator", "SIGKILL")),
        ("Worker_DP1_PP0_TP0", ("worker", "DP1_PP0_TP0", "SIGKILL")),
    ],
)
def test_a_death_ends_all(slow_model: Path, title: str, words: tuple[str, ...]) -> None:
    """The first cause is told once; streams of all API servers get one error event."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        streams = [BackgroundStream(server, max_tokens=4000) for _ in range(4)]
        assert all(stream.started.wait(20) for stream in streams)

        os.kill(server.raywire_processes()[f"RAYWIRE::{title}"].pid, signal.SIGKILL)
        killed_at = time.monotonic()
        server.wait_for_log("first cause", NOTICED_S)
        for stream in streams:
            stream.join()

        remaining_s = END_S - (time.monotonic() - killed_at)
        wait_for(lambda: not server.processes(), f"left: {server.processes()}", remaining_s)
        assert server.wait() == 1
        causes = re.findall(r"^ERROR .*first cause:.*$", server.log, re.MULTILINE)
        assert len(causes) == len(re.findall(r"^ERROR ", server.log, re.MULTILINE)) == 1, server.log
        assert all(word in causes[0] for word in words)
        for stream in streams:
            # Those of a killed API server break; all others end in order.
            if title != "APIServer_1" or stream.failure is None:
                assert [error["code"] for error in stream.errors] == ["engine_dead"]
        server.assert_gone()


@pytest.mark.slow
def test_api_servers_are_ready_together() -> None:
    """Nothing is refused any more once any of them says that it is ready."""
    flags = ("-dp", "2", "--api-server-count", "4", "--served-model-name", "m")
    with running_server("scripted", *flags) as server:
        statuses = []
        for _ in range(16):
            with server.http() as client:
                statuses.append(client.get("/ready").status_code)
        assert statuses == [200] * 16


@pytest.mark.slow
def test_a_hung_rank_is_reported_once(slow_model: Path) -> None:
    """Every API server sees its silence; the first cause is one line all the same."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        os.kill(server.raywire_processes()["RAYWIRE::EngineCore_DP1"].pid, signal.SIGSTOP)
        assert server.wait(40) == 1
        causes = re.findall(r"^ERROR .*first cause:.*$", server.log, re.MULTILINE)
        assert len(causes) == 1, server.log
        assert "engine core DP1: hung: no heartbeat" in causes[0]
        server.assert_gone()


@pytest.mark.slow
def test_a_hung_api_server_ends_all(slow_model: Path) -> None:
    """Otherwise its share of the connections would wait for ever, and no probe could tell."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        os.kill(server.raywire_processes()["RAYWIRE::APIServer_1"].pid, signal.SIGSTOP)
        assert server.wait(40) == 1
        causes = re.findall(r"^ERROR .*first cause:.*$", server.log, re.MULTILINE)
        assert len(causes) == 1, server.log
        assert "API server APIServer_1" in causes[0]
        assert "hung" in causes[0]
        server.assert_gone()


@pytest.mark.row("F-08")
@pytest.mark.slow
def test_death_of_the_command(slow_model: Path) -> None:
    """SIGKILL of the supervisor: nothing survives it, and one child says why."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        server.signal(signal.SIGKILL)
        wait_for(lambda: not server.processes(), f"left: {server.processes()}", END_S)
        assert server.log.count("first cause: parent process") == 1
        server.assert_gone()


@pytest.mark.slow
@pytest.mark.row("F-50")
def test_a_stop_lets_streams_of_all_api_servers_end(slow_model: Path) -> None:
    """SIGTERM drains; new requests are refused meanwhile; exit code 0."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        streams = [BackgroundStream(server, max_tokens=100) for _ in range(4)]
        assert all(stream.started.wait(20) for stream in streams)
        server.signal(signal.SIGTERM)
        for stream in streams:
            stream.join()
            assert stream.finish_reasons == ["length"]
        assert server.wait() == 0
        server.assert_gone()


@pytest.mark.slow
def test_a_crash_while_draining_is_told(slow_model: Path) -> None:
    """It breaks streams like any other: one first cause, and not the exit code of a stop."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        streams = [BackgroundStream(server, max_tokens=150) for _ in range(4)]
        assert all(stream.started.wait(20) for stream in streams)
        server.signal(signal.SIGTERM)
        server.wait_for_log("draining")
        os.kill(server.raywire_processes()["RAYWIRE::APIServer_0"].pid, signal.SIGKILL)
        assert server.wait() == 1
        causes = re.findall(r"^ERROR .*first cause:.*$", server.log, re.MULTILINE)
        assert len(causes) == 1, server.log
        assert "APIServer_0" in causes[0]
        for stream in streams:
            stream.join()
        server.assert_gone()


@pytest.mark.slow
@pytest.mark.row("F-50")
def test_a_second_signal_cuts_streams(slow_model: Path) -> None:
    """Each gets its end, without waiting for the time that a drain may take."""
    with running_server(str(slow_model), "-dp", "2", "--served-model-name", "m") as server:
        streams = [BackgroundStream(server, max_tokens=4000) for _ in range(2)]
        assert all(stream.started.wait(20) for stream in streams)
        server.signal(signal.SIGTERM)
        server.wait_for_log("draining")
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 10
        for stream in streams:
            stream.join()
            assert len(stream.errors) == 1
        server.assert_gone()


@pytest.mark.slow
def test_the_answer_is_that_of_one_rank(tmp_path: Path) -> None:
    """Greedy text in float32 does not depend on which rank computes it, nor on their number."""
    model = str(tiny_model("llama", tmp_path))
    body = completion_body(prompt=[5, 6, 7], max_tokens=24, ignore_eos=True)
    texts = set()
    for flags in ((), ("-dp", "2", "--api-server-count", "1")):
        with running_server(model, "--served-model-name", "m", *flags) as server:
            for rank in range(2 if flags else 1):
                headers = {"X-data-parallel-rank": str(rank)} if flags else {}
                with server.http() as client:
                    answer = client.post("/v1/completions", json=body, headers=headers)
                texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1


@pytest.mark.slow
def test_external_and_hybrid_servers_run_their_own_ranks() -> None:
    """-dp 4 in two parts: rank 0 alone, ranks 2 and 3 together; users see all ranks' numbers."""
    with (
        running_server("scripted", "-dp", "4", "--data-parallel-rank", "0") as external,
        running_server(
            *("scripted", "-dp", "4", "--data-parallel-start-rank", "2"),
            *("--data-parallel-size-local", "2", "--served-model-name", "m"),
        ) as hybrid,
    ):
        assert sorted(external.raywire_processes()) == [
            "RAYWIRE::APIServer_0",
            "RAYWIRE::EngineCore_DP0",
            "RAYWIRE::Worker_DP0_PP0_TP0",
        ]
        topology = Topology(data_parallel_size=2, data_parallel_start_rank=2)
        assert sorted(hybrid.raywire_processes()) == sorted(topology.titles())
        assert {route(hybrid)["rank"] for _ in range(8)} == {"2", "3"}
        assert route(hybrid, **{"X-data-parallel-rank": "3"})["rank"] == "3"
        for server, ranks in ((external, "0"), (hybrid, "23")):
            for rank in ranks:
                assert f"engine core is ready rank={rank} " in server.log


@pytest.mark.slow
@pytest.mark.parametrize("num_api_servers", [1, 2])
def test_a_hybrid_server_names_its_dead_by_their_ranks(
    slow_model: Path, num_api_servers: int
) -> None:
    """The second engine core of a server whose first rank is 2 is DP3: in all lines of the log,
    whether it was killed or hangs."""
    flags = (
        *("-dp", "4", "--data-parallel-start-rank", "2", "--data-parallel-size-local", "2"),
        *("--api-server-count", str(num_api_servers), "--served-model-name", "m"),
    )
    for kill, words in (
        (signal.SIGKILL, "stopping: engine core DP3 is dead\n"),
        (signal.SIGSTOP, "first cause: engine core DP3: hung"),
    ):
        with running_server(str(slow_model), *flags) as server:
            os.kill(server.raywire_processes()["RAYWIRE::EngineCore_DP3"].pid, kill)
            assert server.wait(40) == 1
            assert words in server.log
            assert not re.search(r"engine core (DP[01]|\d)", server.log)
