"""`make demo-cluster`, without the make, on a host of its own: its processes are all there are."""

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.demo import PROMPT
from cluster.demo_keeper import RAY_PORTS
from tests.helpers.server import wait_for
from tests.integration.hosts import Host, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMAND = ("python", "-m", "cluster.demo_cluster", "--model", "scripted", "--log")
ENV = {"OMP_NUM_THREADS": "1", "RAYWIRE_LOG_LEVEL": "WARNING"}
"""A log level that must not keep the demo from seeing its server start."""


@pytest.fixture
def host() -> Iterator[Host]:
    with hosts(1) as (one,):
        yield one


def assert_nothing_is_left(host: Host) -> None:
    wait_for(lambda: not host.processes(), f"no process: {host.processes()}", 30)
    assert host.temporary_files() == []
    assert host.shm_segments() == []


def test_the_demo_shows_a_job_on_ray_and_leaves_it_running(host: Host, tmp_path: Path) -> None:
    """A streamed answer, beside another Ray cluster that has the default ports; curl line, logs and
    status work word for word; `kill` leaves nothing."""
    with host.network(), contextlib.ExitStack() as taken:
        for port in RAY_PORTS.values():
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        said = host.run(*COMMAND, str(tmp_path / "log"), env=ENV, timeout_s=150).stdout

    assert said.count(PROMPT) == 2, said  # it is an echo
    assert f"127.0.0.1:{RAY_PORTS['--dashboard-port']}" not in said
    wait_for(lambda: "ready total=" in (tmp_path / "log").read_text(), "Ray forwards the log", 20)
    curl = re.search(r"curl .*?\}'", said, re.DOTALL)
    look = re.search(r"Look at it:\n\n(.*?)\n\n", said, re.DOTALL)
    stop = re.search(r"Stop it: +(kill \d+)", said)
    assert curl
    assert look
    assert stop
    assert "data: [DONE]\n" in host.run("bash", "-c", curl[0]).stdout
    shown = host.run("bash", "-ec", look[1].replace("logs -f", "logs")).stdout
    assert "ready total=" in shown
    assert re.search(r"2\.0/\d+\.0 CPU", shown), shown  # what both ranks have reserved

    host.run("bash", "-c", stop[1])
    assert_nothing_is_left(host)


@pytest.mark.parametrize("signum", ["-INT", "-TERM"])
def test_a_signal_while_it_starts_leaves_nothing(host: Host, tmp_path: Path, signum: str) -> None:
    """Ctrl-C, or `timeout`: also not Ray, which has its own ideas of when to end."""
    demo = host.popen(*COMMAND, str(tmp_path / "log"), env=ENV)
    wait_for(lambda: any("ray::" in p.args for p in host.processes()), "Ray is coming up", 60)
    (pid,) = [p.pid for p in host.processes() if "cluster.demo_cluster" in p.args]
    host.run("kill", signum, str(pid))

    assert demo.wait(60) != 0
    assert_nothing_is_left(host)


def test_a_demo_that_cannot_start_says_why(host: Host, tmp_path: Path) -> None:
    """The server's own line, and neither server nor Ray is left."""
    command = [part if part != "scripted" else "./nothing" for part in COMMAND]
    result = host.run(*command, str(tmp_path / "log"), env=ENV, timeout_s=120, check=False)

    assert result.returncode == 1
    assert "  error: model folder ./nothing does not exist\n" in result.stdout
    assert_nothing_is_left(host)
