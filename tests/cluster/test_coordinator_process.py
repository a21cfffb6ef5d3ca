"""The coordinator over real sockets: as a child process, and as the class that an actor wraps."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from api.engine_client import EngineClient
from cluster.coordinator_process import CoordinatorServer
from engine.bound import CoordinatorWires, bind_tcp
from engine.curve import CurveKeys
from engine.lifecycle import STOP_SIGNAL
from engine.wire import CoordinatorType, Heartbeat, OutputType, Phase
from tests.helpers.api_peer import socket_folder
from tests.helpers.coordinator_process import (
    CoordinatorUnderTest,
    Peers,
    ipc_wires,
    run_coordinator,
)
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.wires import tcp_wires

TIMEOUT_S = 20.0

DOOMED_PARENT = """
import pathlib, sys, time
from tests.helpers.coordinator_process import ipc_wires, start_process
child = start_process(ipc_wires(pathlib.Path(sys.argv[1])), 1)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[CoordinatorUnderTest]:
    """Of two ranks that are ready."""
    with run_coordinator(num_engines=2) as coordinator:
        for index in range(2):
            coordinator.peers.ready(index)
        yield coordinator


# -------------------------------------------------------------------------------- what it passes on


def test_loads_travel_from_ranks_to_api_servers(shared: CoordinatorUnderTest) -> None:
    """Each rank's latest, with the counts by client; of a rank that dies, none."""
    peers = shared.peers
    peers.load(0, 3)
    peers.load(1, 5)
    report = peers.wait_for_running(3, 5)
    assert [load.engine_index for load in report.loads] == [0, 1]
    assert [load.num_by_client for load in report.loads] == [[3], [5]]

    peers.dead(1)
    assert peers.wait_for_running(3).loads == report.loads[:1]


def test_rubbish_is_dropped_and_heartbeats_are_fine(shared: CoordinatorUnderTest) -> None:
    """Unknown types, broken bodies, ranks that do not exist, no body at all: it goes on."""
    peers = shared.peers
    peers.send(OutputType.HEARTBEAT.value, Heartbeat(0, 0, 1, 2, Phase.IDLE))
    peers.send_raw(b"\x09", b"what")
    peers.send_raw(OutputType.OUTPUTS.value, b"\xc1")
    peers.send_raw(b"")
    peers.send_raw(CoordinatorType.FIRST_REQUEST.value)
    peers.first_request(99, 0)
    peers.load(0, 7)

    assert peers.wait_for_running(7)


def test_who_subscribes_late_need_not_wait_for_a_change(shared: CoordinatorUnderTest) -> None:
    """An API server that has just come gets a report of its own accord."""
    began = time.monotonic()
    with Peers(ipc_wires(shared.folder).addresses) as late:
        late.report()
    assert time.monotonic() - began < 0.9


def test_a_first_request_starts_a_wave_for_all_ranks() -> None:
    """API servers hear of it at once, and of its end; a rank that starts one is not told so."""
    with run_coordinator(num_engines=2) as coordinator:
        peers = coordinator.peers
        for index in range(2):
            peers.ready(index)
            peers.load(index, 0)
        peers.wait_for_running(0, 0)
        peers.first_request(0, 0)
        assert [peers.started(index).wave for index in range(2)] == [0, 0]
        assert peers.wait_for(lambda report: report.is_running).wave == 0

        peers.load(1, 0, wave_complete=0)
        assert peers.wait_for(lambda report: not report.is_running).wave == 1

        peers.load(1, 1, start_wave=1)
        assert peers.started(0).wave == 1
        peers.load(1, 0, wave_complete=1)
        peers.load(0, 1, start_wave=2)
        assert peers.started(1).wave == 2


# ------------------------------------------------------------------------------------ the process


def test_the_process_has_its_title(shared: CoordinatorUnderTest) -> None:
    """As `ps` shows it, and it maps no library of torch or Ray."""
    process = psutil.Process(shared.pid)
    assert process.cmdline()[0] == "RAYWIRE::DPCoordinator"
    assert not [m.path for m in process.memory_maps() if "torch" in m.path or "/ray/" in m.path]


def test_an_idle_coordinator_sleeps(shared: CoordinatorUnderTest) -> None:
    """Under half a percent of a CPU, though two ranks send heartbeats and it reports."""
    peers = shared.peers
    while peers.hears_reports(0.2):  # of the tests above
        peers.report()
    before, began = cpu_ns(shared.pid), time.monotonic()
    for _ in range(3):
        for index in range(2):
            peers.send(OutputType.HEARTBEAT.value, Heartbeat(index, 0, 1, 2, Phase.IDLE))
        peers.report()
    used_ns, elapsed_s = cpu_ns(shared.pid) - before, time.monotonic() - began

    assert elapsed_s > 1.5  # three reports, two seconds between the first and the last
    assert used_ns < 0.005 * elapsed_s * 1e9


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def test_the_stop_signal_ends_it_and_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    """SIGTERM and SIGINT reach the whole group, and are the parent's to act on."""
    with run_coordinator() as coordinator:
        coordinator.peers.report()
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(coordinator.pid, signum)
        coordinator.peers.ready(0)
        coordinator.peers.load(0, 2)
        coordinator.peers.wait_for_running(2)
        began = time.monotonic()
        os.kill(coordinator.pid, STOP_SIGNAL)

        assert coordinator.exit_code() == -STOP_SIGNAL
        assert time.monotonic() - began < 0.9  # it does not wait for the next report
    assert "Traceback" not in capfd.readouterr().err


def test_a_failure_is_logged_once_and_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Here: its sockets cannot be bound, since their folder is gone."""
    with run_coordinator(folder=Path("/nonexistent/folder")) as coordinator:
        assert coordinator.exit_code() == 1
    assert capfd.readouterr().err.count("first cause") == 1


def test_a_killed_parent_takes_it_along() -> None:
    """SIGKILL of the parent, which can tell nobody."""
    with socket_folder() as folder:
        command = [sys.executable, "-c", DOOMED_PARENT, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            coordinator = psutil.Process(int(parent.stdout.readline()))
            with Peers(ipc_wires(folder).addresses) as peers:
                peers.report()
                parent.kill()
                coordinator.wait(timeout=5.0)


# -------------------------------------------------------------------------------------- the class


@contextmanager
def serving(wires: CoordinatorWires) -> Iterator[CoordinatorServer]:
    """A coordinator in a thread, as in an actor."""
    server = CoordinatorServer(wires, 2)
    assert server.bind() == wires.addresses
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10.0)
        assert not thread.is_alive()
        server.stop()  # once more does no harm


def encrypted_wires(host: str = "127.0.0.1") -> CoordinatorWires:
    return CoordinatorWires(
        request=bind_tcp(host),
        output=bind_tcp(host),
        publish=bind_tcp(host),
        keys=CurveKeys.generate(),
    )


def test_over_tcp_it_hears_those_only_whose_keys_were_allowed() -> None:
    """A stranger gets no report and is not heard, an API server and a rank with listed keys are."""
    wires = encrypted_wires()
    ours = CurveKeys.generate()
    with serving(wires) as server:
        server.allow([ours.public])
        with Peers(wires.addresses, CurveKeys.generate()) as strangers:
            strangers.load(0, 6)
            with Peers(wires.addresses, ours) as peers:
                peers.ready(1)
                peers.load(1, 4)
                assert len(peers.wait_for_running(4).loads) == 1
            assert not strangers.hears_reports(0.0)


def test_an_api_server_follows_it_over_tcp() -> None:
    """With the keys of its own wires, and whom to expect there from the addresses."""
    wires, own, rank = encrypted_wires(), tcp_wires(), CurveKeys.generate()
    assert own.public_key is not None

    client = EngineClient(1)
    client.bind(own)
    client.allow([rank.public])
    with serving(wires) as server, FakeEngine(own, keys=rank):
        server.allow([rank.public, own.public_key])
        client.follow(wires.addresses)
        with Peers(wires.addresses, rank) as peers:
            peers.ready(0)
            peers.load(0, 4)
            try:
                asyncio.run(client.wait_ready(TIMEOUT_S))
            finally:
                client.close()


def test_it_can_be_stopped_before_it_runs() -> None:
    """By a parent that has changed its mind."""
    with socket_folder() as folder:
        server = CoordinatorServer(ipc_wires(folder), 2)
        server.stop()
        server.bind()
        running = threading.Thread(target=server.run, daemon=True)
        running.start()
        running.join(TIMEOUT_S)
        assert not running.is_alive()
