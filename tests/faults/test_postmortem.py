"""What a server leaves is enough to tell what ended it, also where it was killed itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import ROOT, Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream

TP2 = ("-tp", "2")
DP2 = ("-dp", "2")


def postmortem(cache_dir: Path) -> dict[str, Any]:
    """What the command says of the latest run, in another process."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "postmortem", "--json"],
        cwd=ROOT,
        env={**os.environ, "RAYWIRE_CACHE_DIR": str(cache_dir)},
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def pid_of(server: Server, title: str) -> int:
    if title == "raywire":  # the command, where it supervises several API servers
        return server.process.pid
    return server.raywire_processes()[f"RAYWIRE::{title}"].pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "title", "words"),
    [
        (TP2, "Worker_DP0_PP0_TP1", "worker DP0_PP0_TP1 pid={pid} node="),
        (TP2, "EngineCore_DP0", "engine core EngineCore_DP0 pid={pid} node="),
        (TP2, "APIServer_0", "the command (pid {pid}) has ended without a word"),
        (DP2, "APIServer_1", "API server APIServer_1 pid={pid} node="),
        (DP2, "DPCoordinator", "coordinator DPCoordinator pid={pid} node="),
        (DP2, "raywire", "the command (pid {pid}) has ended without a word"),
    ],
)
def test_a_killed_process_is_named_afterwards(
    tmp_path: Path, flags: tuple[str, ...], title: str, words: str
) -> None:
    """As what died first, by signal, with the pids and last lines of all; and it says what to
    do."""
    model, cache_dir = make_slow_model(tmp_path), tmp_path / "cache"
    env = {"RAYWIRE_CACHE_DIR": str(cache_dir)}
    with running_server(str(model), *flags, "--served-model-name", "m", env=env) as server:
        stream = BackgroundStream(server, max_tokens=4000)
        assert stream.started.wait(20)
        assert postmortem(cache_dir)["is_running"]
        pids = {
            name.removeprefix("RAYWIRE::"): p.pid for name, p in server.raywire_processes().items()
        }
        pid = pid_of(server, title)
        os.kill(pid, signal.SIGKILL)
        stream.join()
        server.wait()
        wait_for(lambda: not server.processes(), "all processes are gone")

        report = postmortem(cache_dir)
        assert not report["is_running"]
        first, *later = report["causes"]
        assert first.startswith(words.format(pid=pid)), report["causes"]
        assert "killed" in first
        assert later == []
        assert "SIGKILL" in report["advice"][0]
        begun = {
            event["process"]: event["pid"]
            for event in report["events"]
            if event["event"] == "begin"
        }
        assert {name: begun.get(name) for name in pids} == pids
        assert set(report["last_lines"]) >= set(pids)


@pytest.mark.slow
def test_a_rank_that_was_replaced_has_ended_nothing(tmp_path: Path) -> None:
    """Neither while the server lives nor after a stop: it is told as survived, and what to do about
    it."""
    cache_dir = tmp_path / "cache"
    env = {"RAYWIRE_CACHE_DIR": str(cache_dir)}
    flags = ("-dp", "2", "--on-engine-death", "replace")
    with running_server("scripted", *flags, env=env) as server:
        pid = pid_of(server, "EngineCore_DP1")
        os.kill(pid, signal.SIGKILL)
        server.wait_for_log("engine core DP1 is back")
        reports = [postmortem(cache_dir)]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0

    for report in (*reports, postmortem(cache_dir)):
        assert report["causes"] == []
        [loss] = report["survived"]
        assert loss.startswith(f"engine core EngineCore_DP1 pid={pid} ")
        assert "SIGKILL" in report["advice"][0]
