"""After the death of any process, at any time, nothing is left: no process, no socket file, no
temporary folder, no segment. SIGKILL, which nobody can prepare for."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream

END_S = 40.0
"""For all processes to be gone after the death of one. 5 s are promised (`test_life_and_death.py`);
but a process that is just being started does nothing before it has imported what it needs, and
where dozens of others want the cores, that takes a while."""

START_S = 120.0

TP2 = ("-tp", "2")
DP2 = ("-dp", "2", "--api-server-count", "2")
TITLES = {
    TP2: ("APIServer_0", "EngineCore_DP0", "Worker_DP0_PP0_TP1"),
    DP2: ("raywire", "APIServer_1", "DPCoordinator", "EngineCore_DP1", "Worker_DP0_PP0_TP0"),
}
"""Each kind of process, by title; `raywire` is the command where it supervises."""

CASES = [
    pytest.param(flags, title, id=f"{' '.join(flags[:2])} {title}")
    for flags, titles in TITLES.items()
    for title in titles
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.row("F-01", "F-08")]


def pid_of(server: Server, title: str) -> int | None:
    """None: it does not exist yet."""
    if title == "raywire":
        return server.process.pid
    process = server.raywire_processes().get(f"RAYWIRE::{title}")
    return None if process is None else process.pid


def is_command(flags: tuple[str, ...], title: str) -> bool:
    return title == "raywire" or (flags == TP2 and title == "APIServer_0")


def kill(server: Server, flags: tuple[str, ...], title: str) -> None:
    """Kill it, and see all others end, with one line that says why."""
    pid = wait_for(lambda: pid_of(server, title), title, START_S)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    code = server.wait()
    assert code == (-signal.SIGKILL if is_command(flags, title) else 1), server.log
    remaining_s = max(0.0, END_S - (time.monotonic() - killed_at))
    wait_for(lambda: not server.processes(), f"left: {server.processes()}", remaining_s)
    causes = re.findall(r"^ERROR .*first cause:.*$", server.log, re.MULTILINE)
    # Nobody may be there yet who could tell of the command's death.
    assert len(causes) == 1 or (is_command(flags, title) and not causes), server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize(("flags", "title"), CASES)
def test_while_it_loads(flags: tuple[str, ...], title: str) -> None:
    """As soon as the process exists. The socket folder of a command that was killed is left to the
    next start, which sweeps it."""
    with running_server(
        "scripted", *flags, is_ready_awaited=False, may_leave_files=is_command(flags, title)
    ) as server:
        if is_command(flags, title):
            # Long enough that it has children who are loading.
            wait_for(lambda: pid_of(server, "Worker_DP0_PP0_TP0"), "a worker", START_S)
        kill(server, flags, title)
        if not is_command(flags, title):
            server.assert_gone()


@pytest.mark.parametrize(("flags", "title"), CASES)
@pytest.mark.parametrize("is_draining", [False, True], ids=["serving", "draining"])
def test_under_load(tmp_path: Path, flags: tuple[str, ...], title: str, is_draining: bool) -> None:
    """With streams under way, before and after a SIGTERM: what another API server still drains may
    take its --shutdown-timeout."""
    model = make_slow_model(tmp_path)
    served = (*flags, "--served-model-name", "m", "--shutdown-timeout", "15")
    with running_server(str(model), *served) as server:
        streams = [BackgroundStream(server, max_tokens=4000) for _ in range(4)]
        assert all(stream.started.wait(30) for stream in streams)
        if is_draining:
            server.signal(signal.SIGTERM)
            server.wait_for_log("draining")
        kill(server, flags, title)
        for stream in streams:
            stream.join()
        server.assert_gone()
