"""The hosts that other tests rely on are hosts, and leave nothing."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.server import ROOT, wait_for
from tests.integration import hosts as hosts_module
from tests.integration.hosts import Host, hosts, wait_for_reach

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[tuple[Host, Host]]:
    with hosts(2) as (one, two):
        yield one, two


def test_hosts_have_names_addresses_and_processes_of_their_own(
    two_hosts: tuple[Host, Host],
) -> None:
    """What one does, the other does not see, but the checkout is the same."""
    one, two = two_hosts
    sleeper = one.popen("sleep", "1000")
    wait_for(lambda: [p.args for p in one.processes()] == ["sleep 1000"], "it runs")

    assert two.processes() == []
    one.run("kill", str(one.processes()[0].pid))
    assert sleeper.wait(5) != 0
    assert [host.run("hostname").stdout.strip() for host in two_hosts] == ["node1", "node2"]
    assert one.run("pwd").stdout.strip() == str(ROOT)
    assert one.run("getent", "hosts", "node2").stdout.split() == [two.address, "node2"]


def test_memory_and_temporary_files_are_a_hosts_own(two_hosts: tuple[Host, Host]) -> None:
    """Also limited: a server that wants more shared memory than there is has to notice."""
    one, two = two_hosts
    one.run("sh", "-c", "touch /dev/shm/mine $TMPDIR/mine")

    assert (one.shm_segments(), two.shm_segments()) == (["mine"], [])
    assert (one.temporary_files(), two.temporary_files()) == (["mine"], [])
    too_large = one.run("fallocate", "-l", "600M", "/dev/shm/large", check=False)
    assert "No space left" in too_large.stdout
    one.run("sh", "-c", "rm -f /dev/shm/* $TMPDIR/*")


def test_a_listener_is_seen_and_reached_over_both_protocols(two_hosts: tuple[Host, Host]) -> None:
    """From the other host; one on loopback is neither."""
    one, two = two_hosts
    with one.network():
        ipv4 = socket.create_server((one.address, 0))
        ipv6 = socket.create_server((one.address6, 0), family=socket.AF_INET6)
        local = socket.create_server(("127.0.0.1", 0))
    with ipv4, ipv6, local:
        here = {sock.getsockname()[:2] for sock in (ipv4, ipv6)}
        # This process is outside: `ss` sees the sockets, but nobody of the host who holds them.
        seen = one.run("ss", "-Hltn").stdout
        for address in (ipv4.getsockname(), ipv6.getsockname()):
            with two.network():
                socket.create_connection(address[:2], timeout=5).close()
        assert all(f":{port} " in seen for _, port in here)
        with two.network(), pytest.raises(ConnectionRefusedError):
            socket.create_connection((one.address, local.getsockname()[1]), timeout=5)

    code = "import socket, time; s = socket.create_server(('', 7001)); time.sleep(1000)"
    server = one.popen(sys.executable, "-c", code)
    listeners = wait_for(one.listening, "it listens")
    assert [(listener.address, listener.port) for listener in listeners] == [("0.0.0.0", 7001)]
    one.run("kill", str(listeners[0].pid))
    server.wait(5)


def test_a_cut_host_is_out_of_reach_until_healed(two_hosts: tuple[Host, Host]) -> None:
    """In both directions, and nothing else happens to it."""
    one, two = two_hosts
    wait_for_reach(one, two)
    inhabitant = two.popen("sleep", "1000")

    two.cut()
    wait_for_reach(one, two, is_reachable=False)
    wait_for_reach(two, one, is_reachable=False)
    assert [process.args for process in two.processes()] == ["sleep 1000"], "it lives on"
    two.heal()
    wait_for_reach(one, two)
    wait_for_reach(two, one)
    two.run("kill", str(two.processes()[0].pid))
    inhabitant.wait(5)


def test_a_far_host_answers_late_and_tcp_mends_what_is_lost(
    two_hosts: tuple[Host, Host],
) -> None:
    """Every way costs the delay, the bytes arrive whole, and afterwards it is near again."""
    one, two = two_hosts
    sent = os.urandom(2_000_000)

    def connect() -> tuple[socket.socket, float]:
        with two.network():
            began = time.monotonic()
            client = socket.create_connection(address, timeout=10)
        return client, time.monotonic() - began

    with one.network(), socket.create_server((one.address, 0)) as server:
        address = server.getsockname()
        with two.far_away(0.1, loss=0.01):
            client, took_s = connect()
            assert 0.2 <= took_s < 5
            accepted, _ = server.accept()
            writer = threading.Thread(target=client.sendall, args=(sent,))
            writer.start()
            received = bytearray()
            while len(received) < len(sent):
                received += accepted.recv(1 << 16)
            writer.join(10)
            assert received == sent
        near, took_s = connect()
        assert took_s < 0.1
        for each in (client, accepted, near):
            each.close()


def test_orphans_are_reaped(two_hosts: tuple[Host, Host]) -> None:
    """Whoever watches a process by its pid must see it go, though its parent went first."""
    one, _ = two_hosts
    one.run("sh", "-c", "sleep 0.1 &")
    all_of_them = ("ps", "-ww", "-eo", "pid=,stat=,args=")
    wait_for(lambda: "sleep" not in one.run(*all_of_them).stdout, "not even a zombie")
    assert " Z" not in one.run(*all_of_them).stdout


def test_a_crash_ends_everything_on_the_host() -> None:
    """And nothing on the others."""
    with hosts(2) as (one, two):
        victims = [one.popen("setsid", "sleep", "1000") for _ in range(2)]
        survivor = two.popen("sleep", "1000")
        one.crash()

        assert [process.poll() for process in victims] != [None, None]
        assert survivor.poll() is None


def test_a_killed_test_run_leaves_nothing(tmp_path: Path) -> None:
    """Neither processes nor namespaces: they have no name, so they live in processes only. An empty
    folder is all that stays."""
    code = """
import sys, threading
from tests.integration.hosts import hosts
with hosts(2) as (one, two):
    process = one.popen("setsid", "sleep", "54321")
    print(one._namespaces.pid, two._namespaces.pid, flush=True)
    threading.Event().wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None
        inits = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        inside = [Path(f"/proc/{init.pid}/ns/pid").readlink() for init in inits]
        run.kill()

    def is_anybody_there() -> bool:
        return any(_pid_namespace(process.pid) in inside for process in psutil.process_iter())

    wait_for(lambda: not is_anybody_there(), "all processes of both hosts are gone")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def _pid_namespace(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:
        return None


def test_a_machine_without_namespaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped with the reason; a failure where namespaces are required."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv(hosts_module.REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no hosts on this machine"):
        hosts_module.skip_where_refused()

    monkeypatch.setenv(hosts_module.REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="no hosts on this machine"):
        hosts_module.skip_where_refused()
