"""The processes of a running server, as `ps` shows them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.plan import Topology
from tests.helpers.server import Process, Server, running_server, wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("scripted", env={"VLLM_API_SERVER_COUNT": "2"}) as server:
        yield server


def assert_processes(server: Server, topology: Topology) -> None:
    """`ps` and the plan agree, name by name."""
    assert sorted(server.raywire_processes()) == sorted(topology.titles())
    assert len(server.raywire_processes()) == topology.num_processes


def test_one_device_is_three_processes(server: Server) -> None:
    """API server, engine core, worker; the API server is the command itself."""
    assert_processes(server, Topology())
    assert server.raywire_processes()["RAYWIRE::APIServer_0"].pid == server.process.pid


def test_only_the_resource_tracker_comes_on_top(server: Server) -> None:
    """Python's own helper of spawned processes; nothing else runs that the formula leaves out."""
    others = [p for p in server.processes() if not p.title.startswith("RAYWIRE::")]

    assert all("resource_tracker" in p.title for p in others), others


def libc_address(process: Process) -> str:
    """Where its C library lies: in a forked process where it lies in the parent."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return next(line for line in maps if "libc.so" in line).partition("-")[0]


@pytest.mark.parametrize(
    ("topology", "method"),
    [
        (Topology(tensor_parallel_size=2), "fork"),
        (Topology(tensor_parallel_size=2, pipeline_parallel_size=2), "spawn"),
    ],
    ids=["-tp 2", "-tp 2 -pp 2"],
)
def test_processes_of_a_parallel_server(topology: Topology, method: str) -> None:
    """-tp 2 is four processes, -tp 2 -pp 2 is six, however the workers are started."""
    env = {"RAYWIRE_WORKER_MULTIPROC_METHOD": method}
    with running_server("scripted", *topology.flags.split(), env=env) as server:
        assert_processes(server, topology)
        processes = server.raywire_processes()
        core, worker = (
            libc_address(processes[f"RAYWIRE::{title}"])
            for title in ("EngineCore_DP0", "Worker_DP0_PP0_TP0")
        )
        assert core == worker or method == "spawn"


def test_an_idle_server_is_asleep(server: Server) -> None:
    """Under 2% of a core over all processes, heartbeats included."""
    with server.http() as client:
        body = {"model": "scripted", "prompt": "wake up", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert server.cpu_share(seconds=5) < 0.02


def test_no_torch_outside_the_workers(server: Server) -> None:
    """API server and engine core load neither torch nor transformers."""
    processes = server.raywire_processes()
    for title in ("RAYWIRE::APIServer_0", "RAYWIRE::EngineCore_DP0"):
        maps = Path(f"/proc/{processes[title].pid}/maps").read_text()
        assert "libtorch" not in maps, title


@pytest.mark.row("S-04")
def test_nothing_listens_but_the_http_port(server: Server) -> None:
    """Internal sockets are files that are gone; loopback and network have the HTTP port only."""
    assert {port for _, port in server.listeners()} == {server.port}
    wait_for(lambda: not server.leftovers(), "no socket files any more", 5)


def test_few_cores_are_told_once(server: Server) -> None:
    """A machine with less than two vCPUs for each process: the server runs, and warns."""
    warnings = server.log.count("vCPUs and this machine has")
    assert warnings == (1 if len(os.sched_getaffinity(0)) < Topology().min_vcpus else 0)


def test_vllms_variables_are_told(server: Server) -> None:
    """They have no effect, and the log says what has."""
    warning = "VLLM_API_SERVER_COUNT is vLLM's and has no effect here; use --api-server-count"
    assert server.log.count(warning) == 1


def test_the_log_has_the_start_up_times(server: Server) -> None:
    """One line with each stage, and one with the address."""
    parts = ["model_code", "weights", "kernels", "warm_up", "handshake"]
    stages = ["total", "imports", "resolve", "place", "spawn", "workers", *parts]
    server.wait_for_log("ready " + " ".join(rf"{stage}=\d+\.\ds" for stage in stages))
    server.wait_for_log(rf"serving at http://localhost:{server.port}")
    assert server.log.count("ready total=") == 1
