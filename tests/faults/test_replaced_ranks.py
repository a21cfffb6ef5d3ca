"""--on-engine-death replace: a rank that dies is a pause for its streams, and is soon back."""

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream, completion_body, metric

GAP_S = 2.0
"""The longest pause that a client may see when a rank is killed on this machine."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--on-engine-death", "replace", "--served-model-name", "m")


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says what it was told, so that a token that is lost, doubled or somebody else's is heard."""
    folder = tmp_path_factory.mktemp("models")
    return make_scripted_model(folder, kind="echo", step_delay_s=0.02)


@pytest.fixture(scope="module", params=["1", "2"])
def server(request: pytest.FixtureRequest, echo: Path) -> Iterator[Server]:
    """Two ranks, with one API server and with two."""
    flags = ("-dp", "2", "--api-server-count", request.param, *FLAGS)
    with running_server(str(echo), *flags) as server:
        yield server


def letters(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=count))


def kill(server: Server, title: str, signum: signal.Signals = signal.SIGKILL) -> int:
    pid = server.raywire_processes()[f"RAYWIRE::{title}"].pid
    os.kill(pid, signum)
    return pid


def on_rank(server: Server, rank: int, **fields: Any) -> BackgroundStream:
    return BackgroundStream(server, {"X-data-parallel-rank": str(rank)}, **fields)


def answer(server: Server, rank: int, **fields: Any) -> str:
    """What an undisturbed request gets."""
    headers = {"X-data-parallel-rank": str(rank)}
    with server.http() as client:
        response = client.post("/v1/completions", json=completion_body(**fields), headers=headers)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def readiness(server: Server) -> tuple[int, str, int]:
    """The code of `/ready`, its status, and how many ranks are up."""
    with server.http() as client:
        answer = client.get("/ready")
    return answer.status_code, answer.json()["status"], answer.json()["ranks"]["up"]


def wait_until_whole(server: Server) -> None:
    """All ranks are up."""

    wait_for(lambda: readiness(server)[:2] == (200, "ready"), f"all ranks up:\n{server.log}", 60)


@pytest.mark.row("F-04")
def test_a_killed_rank_is_a_pause(server: Server) -> None:
    """Its streams go on at the other one, greedy and seeded, token for token; `/health` stays 200
    and `/ready` says that one of two is up; the rank is back, and takes requests again."""
    wait_until_whole(server)
    epoch = int(metric(server, "raywire:engine_losses_total", engine="1"))
    seeded = {"prompt": letters(99, 120), "max_tokens": 120, "temperature": 4.0, "seed": 7}
    twin = answer(server, 0, **seeded)
    prompts = [letters(seed, 150) for seed in range(4)]
    streams = [on_rank(server, 1, prompt=prompt, max_tokens=200) for prompt in prompts]
    sampled = on_rank(server, 1, **seeded)
    assert all(stream.started.wait(20) for stream in (*streams, sampled))

    pid = kill(server, "EngineCore_DP1")
    server.wait_for_log(rf"first cause: engine core EngineCore_DP1 pid={pid} .*killed by SIGKILL")
    with server.http() as client:
        wait_for(lambda: readiness(server) == (200, "degraded", 1), "degraded")
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=completion_body()).status_code == 200
    assert metric(server, "raywire:engine_up", engine="1") == 0

    for stream in (*streams, sampled):
        stream.join(60)
        assert stream.failure is None
        assert stream.errors == []
        assert stream.finish_reasons in (["stop"], ["length"])
        assert stream.longest_gap_s < GAP_S
    assert [stream.text for stream in streams] == prompts
    assert sampled.text == twin
    wait_until_whole(server)
    assert metric(server, "raywire:engine_losses_total", engine="1") == epoch + 1
    assert answer(server, 1, prompt="hello", max_tokens=20) == "hello"
    assert len(re.findall(rf"^ERROR .*pid={pid}", server.log, re.MULTILINE)) == 1


@pytest.mark.row("F-04")
@pytest.mark.row("F-06")
def test_a_rank_that_hangs_is_a_pause(echo: Path) -> None:
    """SIGSTOP: no heartbeat for 10 s. Nothing is left of it, workers included, when the next one
    starts."""
    with running_server(str(echo), "-dp", "2", *FLAGS) as server:
        old = {title: process.pid for title, process in server.raywire_processes().items()}
        prompt = letters(1, 150)
        stream = on_rank(server, 1, prompt=prompt, max_tokens=200)
        assert stream.started.wait(20)
        pid = kill(server, "EngineCore_DP1", signal.SIGSTOP)

        stream.join(60)
        assert (stream.text, stream.errors) == (prompt, [])
        server.wait_for_log("engine core DP1 is back under epoch 1")
        now = {process.pid for process in server.processes()}
        assert not now & {pid, old["RAYWIRE::Worker_DP1_PP0_TP0"]}
        assert len(re.findall("first cause:", server.log)) == 1, server.log
        assert "first cause: engine core DP1: hung: no heartbeat" in server.log
        assert answer(server, 1, prompt="hello", max_tokens=20) == "hello"


@pytest.fixture
def tight_group() -> Iterator[Path]:
    """A control group whose members get no new page of memory any more."""
    group = Path(f"/sys/fs/cgroup/memory/raywire-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("4096")
    except OSError as error:
        pytest.skip(f"no memory control group of version 1 can be made here: {error}")
    try:
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "no member left", 30)
        group.rmdir()


@pytest.mark.row("F-11")
def test_a_rank_that_is_out_of_memory_is_a_pause(echo: Path, tight_group: Path) -> None:
    """The kernel kills it as soon as it needs more; the log says that it was for memory."""
    with running_server(str(echo), "-dp", "2", "--api-server-count", "1", *FLAGS) as server:
        pid = server.raywire_processes()["RAYWIRE::EngineCore_DP1"].pid
        (tight_group / "cgroup.procs").write_text(str(pid))
        prompt = letters(1, 20_000)  # tens of thousands of tokens need some room
        stream = on_rank(server, 1, prompt=prompt, max_tokens=100)
        server.wait_for_log(
            rf"first cause: engine core EngineCore_DP1 pid={pid} .*killed by SIGKILL.*out of memory"
        )
        stream.join(60)
        assert (stream.text, stream.errors) == (prompt[:100], [])
        server.wait_for_log("engine core DP1 is back under epoch 1")


@pytest.mark.row("F-04")
def test_two_of_four_ranks_die_at_once(echo: Path) -> None:
    """One by its worker: that has one first cause, told by its engine core. The streams of both go
    on at the others, and both are back."""
    with running_server(str(echo), "-dp", "4", "--api-server-count", "2", *FLAGS) as server:
        prompts = [letters(seed, 120) for seed in range(8)]
        streams = [on_rank(server, i % 4, prompt=p, max_tokens=200) for i, p in enumerate(prompts)]
        assert all(stream.started.wait(20) for stream in streams)
        kill(server, "Worker_DP1_PP0_TP0")
        kill(server, "EngineCore_DP2")

        for stream in streams:
            stream.join(60)
            assert (stream.failure, stream.errors) == (None, [])
        assert [stream.text for stream in streams] == prompts
        for rank in (1, 2):
            server.wait_for_log(f"engine core DP{rank} is back under epoch 1")
        wait_until_whole(server)
        causes = re.findall("^ERROR .*first cause:.*$", server.log, re.MULTILINE)
        assert len(causes) == 2, server.log
        assert any("DP1_PP0_TP0" in cause for cause in causes)
        assert {answer(server, rank, prompt="hi", max_tokens=9) for rank in range(4)} == {"hi"}


@pytest.mark.row("F-04")
def test_streams_of_the_only_rank_wait_for_it(echo: Path) -> None:
    """`-dp 1`: new requests are refused meanwhile, and the server is alive, not ready."""
    with running_server(str(echo), *FLAGS) as server:
        prompt = letters(1, 100)
        stream = BackgroundStream(server, prompt=prompt, max_tokens=200)
        assert stream.started.wait(20)
        kill(server, "EngineCore_DP0")
        wait_for(lambda: readiness(server) == (503, "loading", 0), "not ready")
        with server.http() as client:
            assert client.get("/live").status_code == 200
            assert client.get("/health").status_code == 503
            refused = client.post("/v1/completions", json=completion_body())
        assert refused.status_code == 503
        assert refused.headers["retry-after"]

        stream.join(60)
        assert (stream.text, stream.errors) == (prompt, [])
        wait_until_whole(server)


def test_a_rank_that_does_not_come_up_ends_the_server(echo: Path) -> None:
    """After three tries, with a message that says so; nothing is left."""
    with running_server(str(echo), "-dp", "2", *FLAGS) as server:
        stream = on_rank(server, 0, prompt=letters(1, 10_000), max_tokens=10_000)
        assert stream.started.wait(20)
        seen = {kill(server, "EngineCore_DP1")}

        def kill_the_next() -> bool:
            process = server.raywire_processes().get("RAYWIRE::EngineCore_DP1")
            if process is None or process.pid in seen:
                return False
            seen.add(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            return True

        for _ in range(3):
            wait_for(kill_the_next, "another try", 60)
        assert server.wait(30) == 1
        stream.join()
        assert [error["code"] for error in stream.errors] == ["engine_dead"]
        assert "it has failed to start 3 times in a row" in server.log
        server.assert_gone()


def test_a_model_that_is_gone_ends_the_server_at_once(tmp_path: Path) -> None:
    """There is no hope in a second try: exit code 2, and one line that says what is wrong."""
    model = make_scripted_model(tmp_path, kind="echo", step_delay_s=0.02)
    with running_server(str(model), "-dp", "2", *FLAGS) as server:
        (model / "config.json").write_text("{")
        kill(server, "EngineCore_DP1")
        assert server.wait(60) == 2
        assert "config.json" in server.log.splitlines()[-1]
        server.assert_gone()


def test_a_death_while_draining_costs_no_stream(echo: Path) -> None:
    """The other rank finishes what was there; nobody is started; exit code 0."""
    with running_server(str(echo), "-dp", "2", *FLAGS) as server:
        prompts = [letters(seed, 100) for seed in range(4)]
        streams = [on_rank(server, i % 2, prompt=p, max_tokens=200) for i, p in enumerate(prompts)]
        assert all(stream.started.wait(20) for stream in streams)
        server.signal(signal.SIGTERM)
        server.wait_for_log("draining")
        kill(server, "EngineCore_DP1")
        for stream in streams:
            stream.join(60)
        assert [stream.text for stream in streams] == prompts
        assert server.wait() == 0
        assert "engine core DP1 is not replaced while the server ends" in server.log
        server.assert_gone()


def test_a_stop_does_not_wait_for_a_rank_that_is_still_loading(echo: Path) -> None:
    """Here it would load for ever. That it goes is in order, and nothing to warn of."""
    with running_server(str(echo), "-dp", "2", *FLAGS) as server:
        old = kill(server, "EngineCore_DP1")

        def successor() -> int | None:
            process = server.raywire_processes().get("RAYWIRE::EngineCore_DP1")
            return None if process is None or process.pid == old else process.pid

        pid = wait_for(successor, "another engine core")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        told = len(server.log)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "EngineCore_DP1 is still loading; it is not waited for" in server.log[told:]
        assert not re.search("^(WARNING|ERROR)", server.log[told:], re.MULTILINE), server.log
        server.assert_gone()
