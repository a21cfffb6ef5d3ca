"""Finding a Ray cluster; the real thing is marked slow. Refusals are in test_ray_refusals.py."""

import contextlib
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

import psutil
import pytest

from cluster import ray_session
from cluster.placement import Node, Resources
from engine.errors import ConfigError
from engine.lifecycle import stop_on_signals
from tests.helpers.server import ROOT, wait_for


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For Ray's sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        yield Path(folder)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


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


def test_a_cluster_of_our_own_has_a_folder_where_the_site_wants_it(tmp_path: Path) -> None:
    """One that is not there yet is made; one that cannot be is named."""
    parent = tmp_path / "not" / "yet"
    assert ray_session._own_folder(str(parent)).parent == parent

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"in RAY_TMPDIR=.*/file/x: "):
        ray_session._own_folder(str(tmp_path / "file" / "x"))


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
@pytest.mark.row("S-38", "S-39")
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_cluster_of_our_own_is_safe_and_ends_with_us(is_killed: bool, short_folder: Path) -> None:
    """It listens on the loopback device only and wants a token, which is not left in the home
    folder; signals reach us; no process and no folder of it stays, however we end."""
    code = """
import os, signal, sys, time
import psutil
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
        listening = [c for p in psutil.Process().children(recursive=True)
                     for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert len(listening) > 5
        found = {c.laddr.ip.removeprefix("::ffff:") for c in listening}
        assert found <= {"127.0.0.1", "::1"}, listening
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.is_set:
            time.sleep(0.01)
        if "is_killed=True" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    } | {"HOME": str(short_folder), "RAY_TMPDIR": str(short_folder)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, f"{is_killed=}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert done.returncode == (-signal.SIGKILL if is_killed else 0), done.stderr
    assert "WARNING" not in done.stderr
    wait_for(lambda: not _with_files_in(short_folder), "no process of the cluster is left", 20.0)
    wait_for(lambda: not list(short_folder.iterdir()), "no file of the cluster is left", 20.0)


def _with_files_in(folder: Path) -> list[psutil.Process]:
    """Processes that have a file there open."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                found.append(process)
    return found
