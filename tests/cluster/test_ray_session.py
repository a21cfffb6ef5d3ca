"""Finding a Ray cluster, and what its refusals become; the real thing is marked slow."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster import ray_session
from cluster.placement import Node, Resources
from engine.errors import ConfigError
from engine.lifecycle import stop_on_signals
from tests.helpers.server import ROOT, wait_for

VERSION_MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.12.1
This process on node 10.0.0.7 was started with:
    Ray: 2.55.1
    Python: 3.11.7
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For Ray's sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        yield Path(folder)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


# ------------------------------------------------------------------------------------- refusals


def test_another_version_is_told_with_both_sides() -> None:
    """Ray and Python of the cluster and of the command are in one line."""
    line = ray_session.explain(RuntimeError(VERSION_MISMATCH), "10.0.0.1:6379")

    assert "10.0.0.1:6379 runs Ray 2.60.0 with Python 3.12.1" in line
    assert "this command Ray 2.55.1 with Python 3.11.7" in line
    assert "\n" not in line


def test_a_wrong_token_is_told_with_the_variables_to_set() -> None:
    """Ray's own error says so only in the text of its cause's cause."""
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    error.__cause__ = RuntimeError("Traceback …\nAuthenticationError: InvalidAuthToken: missing")

    line = ray_session.explain(error, "10.0.0.1:6379")

    assert "RAY_AUTH_MODE=token" in line
    assert "RAY_AUTH_TOKEN" in line


def test_any_other_refusal_becomes_one_line() -> None:
    """Whatever Ray says, on however many lines."""
    line = ray_session.explain(RuntimeError("no\n  such\nnode"), "auto")

    assert line == "cannot use the Ray cluster at auto: no such node"


def test_the_deepest_cause_is_told() -> None:
    """Ray's own error says that it failed; why is at the end of a traceback in its cause's text."""
    error = ConnectionError("Failed to connect")
    error.__cause__ = RuntimeError("Last error: Traceback …\n  File …\nRpcError: status 404\n")

    line = ray_session.explain(error, "10.0.0.1:6379")

    assert line == "cannot use the Ray cluster at 10.0.0.1:6379: RpcError: status 404"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "nowhere.invalid:6379", "a:b"])
def test_an_address_without_a_cluster_is_refused_at_once(address: str) -> None:
    """Ray would try for minutes; the message says what the address should be."""
    with pytest.raises(ConfigError, match=r"no Ray cluster can be reached at .*--ray-address"):
        ray_session.check_reachable(address)


def test_what_is_no_address_is_called_so() -> None:
    """In words, not in Python's."""
    with pytest.raises(ConfigError, match="at rubbish: that is no host:port"):
        ray_session.check_reachable("rubbish")


def test_a_silent_address_costs_less_than_half_a_minute(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that takes no connection is given up by our deadline, not by Ray's."""
    monkeypatch.setattr(ray_session, "_REACH_TIMEOUT_S", 0.1)
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    port = full.getsockname()[1]
    waiting = [socket.socket() for _ in range(2)]
    for each in waiting:
        each.setblocking(False)
        each.connect_ex(("127.0.0.1", port))
    try:
        with pytest.raises(ConfigError, match="does not answer"):
            ray_session.check_reachable(f"127.0.0.1:{port}")
    finally:
        for each in [*waiting, full]:
            each.close()


# ------------------------------------------------------------------------------- finding, nodes


def test_a_cluster_that_has_died_is_not_taken_for_one(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's note of this node's cluster counts as long as somebody listens there."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_session._cluster_here() is None

    (tmp_path / "ray").mkdir()
    note = tmp_path / "ray" / "ray_current_cluster"
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    note.write_text(f"{address}\n")
    assert ray_session._cluster_here() == address

    note.write_text("127.0.0.1:1\n")
    assert ray_session._cluster_here() is None


def test_the_cluster_here_is_found_in_the_temporary_folder_of_the_site(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray follows TMPDIR, and another cluster in /tmp is not meant then."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)

    assert ray_session._cluster_here() == address


def test_a_node_is_what_ray_says_of_it() -> None:
    """Resources that nobody has a part of count as none, and fractions stay."""
    row = {
        "NodeID": "aa",
        "NodeManagerAddress": "10.0.0.1",
        "Alive": True,
        "Resources": {"CPU": 4.0, "GPU": 2.0, "memory": 5e9, "node:10.0.0.1": 1.0},
    }

    node = ray_session.describe_node(row, {"CPU": 0.5, "memory": 1e9}, "aa")

    assert node == Node(
        node_id="aa",
        address="10.0.0.1",
        total=Resources(cpus=4.0, gpus=2.0, memory_bytes=5_000_000_000),
        available=Resources(cpus=0.5, memory_bytes=1_000_000_000),
        is_driver=True,
    )


# --------------------------------------------------------------------------------------- manners


def test_our_signal_handlers_outlive_those_of_a_library() -> None:
    """Ray takes SIGTERM past Python, in whatever thread it is started."""

    def take_over() -> None:
        with ray_session._our_signal_handlers():
            ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))  # SIG_IGN

    with stop_on_signals() as stop, ThreadPoolExecutor(1) as pool:
        pool.submit(take_over).result()
        os.kill(os.getpid(), signal.SIGTERM)

        wait_for(lambda: stop.is_set, "the signal")
        assert stop.count == 1


def test_nobody_imports_ray_who_does_not_use_it() -> None:
    """Not the command, nor the launch of a server, nor the modules that would use it."""
    modules = "cluster.cli, cluster.launch, cluster.ray_session"
    code = f"import sys, {modules}; sys.exit('ray' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# ------------------------------------------------------------------------------------ a real one


@pytest.mark.slow
def test_a_cluster_of_our_own_is_safe_and_ends_with_us(short_folder: Path) -> None:
    """It wants a token, which is not left in the home folder; signals reach us; nothing stays."""
    code = """
import os, signal, time
from concurrent.futures import ThreadPoolExecutor
from cluster import ray_session
from engine.lifecycle import stop_on_signals

with stop_on_signals() as stop, ThreadPoolExecutor(1) as pool:
    with pool.submit(ray_session.connect, None, num_cpus=7).result() as session:
        [node] = session.observe_nodes()
        assert session.is_ours and node.is_driver and node.is_alive
        assert node.node_id == session.node_id and node.address == session.address
        assert node.total.cpus == node.available.cpus >= 7
        assert os.environ["RAY_AUTH_MODE"] == "token"
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.is_set:
            time.sleep(0.01)
"""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    } | {"HOME": str(short_folder), "RAY_TMPDIR": str(short_folder)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert not (short_folder / ".ray").exists()
    sessions = str(short_folder / "ray")
    wait_for(lambda: not _processes_with(sessions), "no process of the cluster is left")


def _processes_with(text: str) -> list[str]:
    """Command lines that have it."""
    listing = subprocess.run(["ps", "-ww", "-eo", "args="], capture_output=True, text=True)
    return [line for line in listing.stdout.splitlines() if text in line]
