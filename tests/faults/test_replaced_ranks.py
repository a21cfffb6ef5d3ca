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

    wait_for(lambda: readiness(server) == (200, "ready", 2), f"all ranks up:\n{server.log}", 60)


@pytest.mark.slow
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
