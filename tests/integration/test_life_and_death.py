"""Living and dying together: the death of any one process ends all, with the cause told once."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.scripted_models import make_scripted_model, make_slow_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream, completion_body, wait_for_running
from tests.helpers.tiny_models import tiny_model

FLAGS = ("--served-model-name", "m", "-tp", "2")
END_S = 5.0
"""All processes must be gone that soon after the death of one."""


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speaks for ever, at 50 tokens a second."""
    return make_slow_model(tmp_path_factory.mktemp("models"))


def kill(server: Server, title: str) -> float:
    """SIGKILL the process with that title, and return when."""
    process = server.raywire_processes()[f"RAYWIRE::{title}"]
    os.kill(process.pid, signal.SIGKILL)
    return time.monotonic()


def assert_ends(server: Server, killed_at: float) -> None:
    """Every process is gone within the time allowed."""
    remaining_s = END_S - (time.monotonic() - killed_at)
    wait_for(lambda: not server.processes(), f"still there: {server.processes()}", remaining_s)


def first_causes(server: Server) -> list[str]:
    return re.findall(r"^.*first cause:.*$", server.log, re.MULTILINE)


def assert_one_first_cause(server: Server, *words: str) -> None:
    """One ERROR line that says who, and how; no other process logs an ERROR about it."""
    causes = first_causes(server)
    assert len(causes) == 1, server.log
    [line] = causes
    assert line.startswith("ERROR ")
    for word in words:
        assert word in line
    assert len(re.findall(r"^ERROR ", server.log, re.MULTILINE)) == 1, server.log


@pytest.mark.row("F-01")
@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("EngineCore_DP0", ("EngineCore_DP0", "SIGKILL")),
        ("Worker_DP0_PP0_TP0", ("DP0_PP0_TP0", "SIGKILL")),
        # The other rank replies to nothing, so its death is seen by its end alone.
        pytest.param("Worker_DP0_PP0_TP1", ("DP0_PP0_TP1", "SIGKILL"), marks=pytest.mark.slow),
    ],
)
def test_a_death_ends_all_and_tells_clients(
    slow_model: Path, title: str, words: tuple[str, ...]
) -> None:
    """Streams get one error event, waiting requests 503 engine_dead, probes 503; exit code 1."""
    with running_server(str(slow_model), *FLAGS) as server:
        stream = BackgroundStream(server, max_tokens=4000)
        assert stream.started.wait(10)

        killed_at = kill(server, title)
        answers = list(answers_of_a_dying_server(server))
        stream.join()

        assert_ends(server, killed_at)
        assert server.wait() == 1
        assert_one_first_cause(server, *words)
        assert stream.failure is None
        [error] = stream.errors
        assert error["code"] == "engine_dead"
        assert stream.finish_reasons == []
        assert ("/health", 503) in answers
        assert ("/live", 503) in answers
        assert ("/v1/completions", 503) in answers
        server.assert_gone()


@pytest.mark.row("F-01")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "title"),
    [(("-tp", "2"), "Worker_DP0_PP0_TP1"), (("-pp", "2"), "Worker_DP0_PP0_TP0")],
)
def test_death_of_a_rank_of_a_real_model(
    tmp_path: Path, flags: tuple[str, str], title: str
) -> None:
    """The other one waits for it in a collective, and its complaint is not the first cause."""
    model = tiny_model("llama", tmp_path)
    with running_server(str(model), *flags, "--served-model-name", "m") as server:
        rank = server.raywire_processes()[f"RAYWIRE::{title}"]
        stream = BackgroundStream(server, prompt=[5], max_tokens=500, ignore_eos=True)
        assert stream.started.wait(10)

        os.kill(rank.pid, signal.SIGKILL)
        killed_at = time.monotonic()

        stream.join()
        assert_ends(server, killed_at)
        assert server.wait() == 1
        assert_one_first_cause(server, title.removeprefix("Worker_"), "SIGKILL")
        assert [error["code"] for error in stream.errors] == ["engine_dead"]
        server.assert_gone()


@pytest.mark.row("F-06")
@pytest.mark.slow
def test_an_engine_core_that_hangs_is_a_dead_one(slow_model: Path) -> None:
    """SIGSTOP: no heartbeat for 10 s is a cause like any other, and ends all in the same way."""
    with running_server(str(slow_model), *FLAGS) as server:
        stream = BackgroundStream(server, max_tokens=4000)
        assert stream.started.wait(10)
        core = server.raywire_processes()["RAYWIRE::EngineCore_DP0"]
        os.kill(core.pid, signal.SIGSTOP)
        with server.http() as client:
            assert client.get("/live").status_code == 200
            wait_for(lambda: client.get("/live").status_code == 503, "no longer alive", 20)
            told_at = time.monotonic()

        stream.join()
        assert_ends(server, told_at)
        assert server.wait() == 1
        assert_one_first_cause(server, "hung: no heartbeat for 1")
        assert [error["code"] for error in stream.errors] == ["engine_dead"]
        server.assert_gone()


@pytest.mark.row("F-05")
def test_an_error_on_a_rank_that_does_not_reply(tmp_path: Path) -> None:
    """A model that raises is a death like any other: told once, with its traceback, and to clients
    without it."""
    model = make_scripted_model(
        tmp_path, kind="cycle", token_ids=[97], step_delay_s=0.02, raise_at_step=20, raise_on_rank=1
    )
    with running_server(str(model), *FLAGS) as server:
        stream = BackgroundStream(server, max_tokens=4000)
        stream.join()

        assert server.wait() == 1
        assert_one_first_cause(server, "DP0_PP0_TP1", "step 20")
        assert server.log.count("Traceback") == 1
        assert stream.failure is None
        [error] = stream.errors
        assert error["code"] == "engine_dead"
        assert "Traceback" not in error["message"]
        server.assert_gone()


def answers_of_a_dying_server(server: Server) -> Iterator[tuple[str, int]]:
    """What probes and new requests get, until the port closes. Every 503 for a completion says
    `engine_dead`."""
    with server.http(timeout_s=5.0) as client:
        while True:
            try:
                yield "/health", client.get("/health").status_code
                yield "/live", client.get("/live").status_code
                response = client.post("/v1/completions", json=completion_body(max_tokens=1))
            except httpx.TransportError:
                return
            if response.status_code == 503:
                assert response.json()["error"]["code"] == "engine_dead"
            yield "/v1/completions", response.status_code
            time.sleep(0.02)


def test_a_pending_answer_fails_with_503(slow_model: Path) -> None:
    """A request that has not had its first byte gets an OpenAI error, not a broken connection."""
    with running_server(str(slow_model), "--served-model-name", "m") as server:
        with ThreadPoolExecutor() as pool, server.http() as client:
            body = completion_body(max_tokens=4000)  # takes more than a minute
            pending = pool.submit(client.post, "/v1/completions", json=body)
            wait_for_running(server, 1)
            kill(server, "EngineCore_DP0")
            response = pending.result(20)

        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
        assert server.wait() == 1


@pytest.mark.row("F-08")
def test_death_of_the_api_server(slow_model: Path) -> None:
    """SIGKILL of the command's own process: nothing survives it, and nothing is left."""
    with running_server(str(slow_model), *FLAGS) as server:
        stream = BackgroundStream(server, max_tokens=4000)
        assert stream.started.wait(10)

        assert_ends(server, kill(server, "APIServer_0"))
        assert_one_first_cause(server, "parent process", "gone")
        server.assert_gone()


@pytest.mark.row("F-08")
@pytest.mark.parametrize("title", ["APIServer_0", "EngineCore_DP0", "Worker_DP0_PP0_TP0"])
def test_death_while_loading(title: str) -> None:
    """The same as soon as the process exists, long before the server is ready."""
    with running_server("scripted", is_ready_awaited=False, may_leave_files=True) as server:
        # Before the engine core exists there is nobody who could tell of the API server's death.
        last = "EngineCore_DP0" if title == "APIServer_0" else title
        wait_for(lambda: f"RAYWIRE::{last}" in server.raywire_processes(), last, 30)

        killed_at = kill(server, title)

        assert_ends(server, killed_at)
        assert server.wait() == (-signal.SIGKILL if title == "APIServer_0" else 1)
        assert_one_first_cause(server)


def test_what_a_killed_start_leaves_is_swept() -> None:
    """The next start removes the socket folder that a SIGKILL left behind."""
    with running_server("scripted", is_ready_awaited=False, may_leave_files=True) as server:
        wait_for(lambda: list(server.folder.glob("raywire-*")), "a socket folder", 30)
        server.signal(signal.SIGKILL)  # by its number: it has no title yet
        assert_ends(server, time.monotonic())
        server.wait()  # a zombie counts as alive
        left = list(server.folder.glob("raywire-*"))
        assert left

        with running_server("scripted", env={"RAYWIRE_RPC_BASE_PATH": str(server.folder)}):
            assert not any(folder.exists() for folder in left)


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("Worker_DP0_PP0_TP0", ("load has no reply", "DP0_PP0_TP0")),
        pytest.param(
            "EngineCore_DP0",
            ("no READY within 15 s", "engine core DP0"),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.row("F-22")
def test_a_start_that_takes_too_long_names_who_is_missing(
    title: str, words: tuple[str, ...]
) -> None:
    """--startup-timeout ends it, with the process that stands still and what it last said."""
    flags = ("--startup-timeout", "5")
    with running_server("scripted", *flags, is_ready_awaited=False) as server:
        wait_for(lambda: f"RAYWIRE::{title}" in server.raywire_processes(), title, 30)
        server.wait_for_log("workers started")
        os.kill(server.raywire_processes()[f"RAYWIRE::{title}"].pid, signal.SIGSTOP)

        assert server.wait() == 1
        assert_one_first_cause(server, *words)
        server.assert_gone()
