"""`raywire chaos`: the plan comes first, then the faults, then whether they were survived."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import cli
from tests.helpers.http_server import serving
from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import ROOT, running_server
from tests.helpers.streams import BackgroundStream


def test_the_plan_is_shown_and_decided_by_the_seed() -> None:
    """Without a server, and without dealing a fault."""

    def shown(seed: int) -> str:
        arguments = ["chaos", "--dry-run", "--seed", str(seed), "--kinds", "kill-rank,pause-worker"]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    assert shown(7) == shown(7) != shown(8)
    assert len(shown(7).splitlines()) == 10
    assert shown(7).count("kill-rank") == shown(7).count("pause-worker") == 5


def test_a_wrong_kind_is_answered_with_those_there_are() -> None:
    """And the exit code of a mistake."""
    result = CliRunner().invoke(cli, ["chaos", "--kinds", "kill-all"])
    assert result.exit_code == 2
    assert "'kill-all' is none of kill-rank, hang-rank, pause-rank" in result.output


def run_chaos(url: str, *flags: str, key: str = "secret") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cluster", "chaos", "--url", url, *flags],
        cwd=ROOT,
        env={"RAYWIRE_ADMIN_KEY": key, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_server_that_lets_nobody_break_it_is_one_line() -> None:
    """It has no administrator's key."""
    with serving() as server:
        result = run_chaos(str(server.http.base_url), "--duration", "1", "--interval", "1")
    assert result.returncode == 2
    assert "lets nobody break it: start it with an administrator's key" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.row("F-04")
def test_a_server_that_replaces_its_ranks_survives(tmp_path: Path) -> None:
    """A rank is killed and comes back; the streams of a client do not notice."""
    model = make_slow_model(tmp_path, 0.05)
    flags = ("-dp", "2", "--served-model-name", "m", "--on-engine-death", "replace")
    with running_server(str(model), *flags, env={"RAYWIRE_ADMIN_KEY": "secret"}) as server:
        refused = run_chaos(server.url, key="wrong")
        streams = [BackgroundStream(server, max_tokens=400) for _ in range(4)]
        result = run_chaos(server.url, "--duration", "4", "--interval", "4", "--kinds", "kill-rank")
        for stream in streams:
            stream.join(60)

    assert refused.returncode == 2
    assert "by RAYWIRE_ADMIN_KEY or --admin-key" in refused.stderr
    assert result.returncode == 0, result.stdout + result.stderr
    plan, dealt, survived = result.stdout.splitlines()
    assert "kill-rank" in plan
    assert "kill-rank EngineCore_DP" in dealt
    assert "as before after" in dealt
    assert survived == "survived 1 fault"
    for stream in streams:
        assert (stream.failure, stream.errors, stream.finish_reasons) == (None, [], ["length"])
        assert stream.text == ("abc" * 134)[:400]
