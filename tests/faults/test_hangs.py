"""A process that is alive but does nothing is a dead one, and one that does something again is
not."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.test_postmortem import postmortem
from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import running_server, wait_for
from tests.helpers.streams import BackgroundStream


@pytest.mark.slow
@pytest.mark.row("F-06")
def test_a_core_that_makes_no_progress_is_dead(tmp_path: Path) -> None:
    """Its heartbeats go on, and tell how long the step has lasted. /live and /health turn 503, the
    request fails, all ends, and the stacks of the core say where it stood."""
    model, cache_dir = make_slow_model(tmp_path), tmp_path / "cache"
    env = {
        "RAYWIRE_CACHE_DIR": str(cache_dir),
        "RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS": "1",  # hung 10 s later
    }
    flags = ("--served-model-name", "m")
    hanging = "tests.helpers.hanging_core"
    with running_server(str(model), *flags, env=env, module=hanging) as server:
        stream = BackgroundStream(server, max_tokens=4000)
        assert stream.started.wait(20)
        with server.http() as client:
            wait_for(lambda: client.get("/live").status_code == 503, "no longer alive", 40)
            assert client.get("/health").status_code == 503
        stream.join()
        assert [error["code"] for error in stream.errors] == ["engine_dead"]
        assert server.wait() == 1
        [line] = re.findall(r"^ERROR .*$", server.log, re.MULTILINE)
        assert re.search(
            r"first cause: engine core DP0: hung: no progress; last seen in step", line
        )
        report = postmortem(cache_dir)
        assert "in hang" in report["stacks"]["EngineCore_DP0"]
        assert "stacks" in report["advice"][-1]
        server.assert_gone()


@pytest.mark.slow
@pytest.mark.row("F-03")
def test_a_worker_that_pauses_fails_nothing(tmp_path: Path) -> None:
    """Stopped for 3 s, less than a step may take: streams pause, and end as if nothing had been;
    no line of the log for each step."""
    model = make_slow_model(tmp_path)
    with running_server(str(model), "-tp", "2", "--served-model-name", "m") as server:
        streams = [BackgroundStream(server, max_tokens=150) for _ in range(3)]
        assert all(stream.started.wait(20) for stream in streams)
        worker = server.raywire_processes()["RAYWIRE::Worker_DP0_PP0_TP1"]
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(3)  # the fault itself
        os.kill(worker.pid, signal.SIGCONT)
        for stream in streams:
            stream.join()
            assert stream.failure is None
            assert stream.finish_reasons == ["length"]
        assert not re.search(r"^ERROR", server.log, re.MULTILINE), server.log
        assert len(re.findall(r"^WARNING .*has no reply", server.log, re.MULTILINE)) <= 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_api_server_that_stands_still_while_it_loads_ends_the_start() -> None:
    """The others would wait for it for ever, and no probe would ever say ready."""
    flags = ("-dp", "2", "--startup-timeout", "25")
    with running_server("scripted", *flags, is_ready_awaited=False) as server:
        title = "RAYWIRE::APIServer_1"
        wait_for(lambda: title in server.raywire_processes(), title, 120)
        os.kill(server.raywire_processes()[title].pid, signal.SIGSTOP)

        assert server.wait(120) == 1
        [line] = re.findall(r"^ERROR .*first cause.*$", server.log, re.MULTILINE)
        assert "have not loaded within" in line
        assert "APIServer_1 pid=" in line
        server.assert_gone()
