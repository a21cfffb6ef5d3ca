"""SIGTERM and Ctrl-C: running requests end, then everything does, and nothing is left."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.hub import hub
from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import running_server, wait_for
from tests.helpers.streams import BackgroundStream, completion_body, metric, wait_for_running


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speaks for ever, at 50 tokens a second."""
    return make_slow_model(tmp_path_factory.mktemp("models"))


@pytest.mark.row("F-50")
def test_sigterm_drains(slow_model: Path) -> None:
    """Readiness goes at once, new requests get 503, the running stream ends as if nothing were."""
    with running_server(str(slow_model), "--served-model-name", "m") as server:
        stream = BackgroundStream(server, max_tokens=100)
        assert stream.started.wait(10)
        with server.http() as client:
            server.signal(signal.SIGTERM)
            wait_for(lambda: client.get("/ready").status_code == 503, "no longer ready")
            assert client.get("/live").status_code == 200
            refused = client.post("/v1/completions", json=completion_body())

        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        stream.join()
        assert stream.finish_reasons == ["length"]
        assert len(stream.text) == 100
        assert server.wait() == 0
        server.assert_gone()
        assert not re.search(r"^ERROR|Traceback|first cause", server.log, re.MULTILINE), server.log


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
@pytest.mark.row("F-50")
def test_a_signal_to_the_whole_group_drains_too(slow_model: Path, signum: signal.Signals) -> None:
    """As `timeout` and systemd send it, or a terminal that closes: engine core and workers leave it
    to the API server."""
    with running_server(str(slow_model), "--served-model-name", "m", "-tp", "2") as server:
        stream = BackgroundStream(server, max_tokens=50)
        assert stream.started.wait(10)
        os.killpg(server.process.pid, signum)

        stream.join()
        assert stream.finish_reasons == ["length"]
        assert server.wait() == 0
        server.assert_gone()
        assert "first cause" not in server.log


@pytest.mark.row("F-50")
def test_what_does_not_end_in_time_is_ended(slow_model: Path) -> None:
    """After --shutdown-timeout the stream gets a terminal event, and the exit code is still 0."""
    flags = ("--served-model-name", "m", "--shutdown-timeout", "0.5")
    with running_server(str(slow_model), *flags) as server:
        stream = BackgroundStream(server, max_tokens=4000)
        assert stream.started.wait(10)
        began = time.monotonic()
        server.signal(signal.SIGTERM)

        assert server.wait() == 0
        assert time.monotonic() - began < 8
        stream.join()
        assert stream.failure is None
        assert len(stream.errors) + len(stream.finish_reasons) == 1
        server.assert_gone()


@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_ctrl_c_leaves_nothing(slow_model: Path, num_interrupts: int) -> None:
    """Once: drained. Twice: at once, whatever runs. No process, socket file, segment or folder."""
    flags = ("--served-model-name", "m", "-tp", "2")
    with running_server(str(slow_model), *flags) as server:
        stream = BackgroundStream(server, max_tokens=4000 if num_interrupts == 2 else 20)
        assert stream.started.wait(10)
        began = time.monotonic()
        for _ in range(num_interrupts):
            server.interrupt()
            time.sleep(0.1)  # two signals in the same instant are one

        assert server.wait() == 0
        assert time.monotonic() - began < 5
        stream.join()
        server.assert_gone()
        assert "Traceback" not in server.log


@pytest.mark.row("F-52")
def test_stopping_while_loading() -> None:
    """A signal before the server is ready ends it at once and in order: without a warning that
    something would not end, and nothing is left."""
    with running_server("scripted", is_ready_awaited=False) as server:
        wait_for(lambda: "RAYWIRE::Worker_DP0_PP0_TP0" in server.raywire_processes(), "worker", 30)
        began = time.monotonic()
        server.signal(signal.SIGTERM)

        assert server.wait() == 0
        assert time.monotonic() - began < 3
        server.assert_gone()
        # What the start says of the machine is no part of it.
        assert "Traceback" not in server.log
        assert not re.search(r"^(WARNING|ERROR) .*(kill|end)", server.log, re.MULTILINE), server.log


@pytest.mark.slow
@pytest.mark.row("F-52")
@pytest.mark.parametrize("flags", [(), ("-dp", "2", "--api-server-count", "2")], ids=" ".join)
def test_stopping_during_the_handshake(flags: tuple[str, ...]) -> None:
    """Engine cores have loaded and connected, and API servers wait for their READY: the same."""
    mute = "tests.helpers.mute_core"
    with running_server("scripted", *flags, is_ready_awaited=False, module=mute) as server:
        num_cores = 2 if flags else 1
        wait_for(lambda: server.log.count("connected, and mute") == num_cores, "connected", 60)
        began = time.monotonic()
        server.signal(signal.SIGTERM)

        assert server.wait() == 0
        assert time.monotonic() - began < 5
        server.assert_gone()
        assert "Traceback" not in server.log
        assert not re.search(r"^(WARNING|ERROR) .*(kill|end)", server.log, re.MULTILINE), server.log


def test_a_client_that_leaves_stops_its_request(slow_model: Path) -> None:
    """The gauges are back at zero a step later, and the abort is counted."""
    with running_server(str(slow_model), "--served-model-name", "m") as server:
        with (
            server.http() as client,
            client.stream(
                "POST", "/v1/completions", json=completion_body(stream=True, max_tokens=4000)
            ) as response,
        ):
            lines = response.iter_lines()  # kept: the connection goes with it
            next(lines)
            wait_for_running(server, 1)
        wait_for_running(server, 0)
        aborted = metric(server, "raywire:request_success_total", finished_reason="abort")
        assert aborted == 1


def test_a_download_holds_nobody_up(tmp_path: Path) -> None:
    """Ctrl-C while weights come in: everything is gone at once, not when the last one is there."""
    files = {f"model-{i:05}-of-00024.safetensors": b"weights" for i in range(1, 25)}
    gate = threading.Event()
    with hub({"owner/name": files}, gate) as (url, fetched):
        env = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        with running_server("owner/name", env=env, is_ready_awaited=False) as server:
            wait_for(lambda: fetched, "weights are asked for", 60)
            began = time.monotonic()
            server.interrupt()

            assert server.wait() == 0
            assert time.monotonic() - began < 5
            server.assert_gone()
            assert "HTTP Request" not in server.log
            gate.set()
