"""Servers whose engine cores are actors of a real Ray cluster on this machine."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import counted_ray
from tests.helpers.ray_nodes import NUM_CPUS, RayNodes, ray_nodes
from tests.helpers.server import ROOT, Process, Server, running_server, wait_for
from tests.helpers.streams import completion_body, read_events

pytestmark = pytest.mark.slow

TWO_RANKS = ("-dp", "2", "--served-model-name", "m")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no actor, no worker, no placement group."""
    yield
    if "nodes" in request.fixturenames:
        cluster: RayNodes = request.getfixturevalue("nodes")
        wait_for(lambda: not cluster.actors(), f"no actor is left: {cluster.actors()}", 10)
        assert cluster.reservations() == []


def complete(server: Server, prompt: str = "hello", **headers: str) -> str:
    with server.http() as client:
        body = completion_body(prompt=prompt, max_tokens=64)
        answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def variables_of(pid: int) -> dict[str, str]:
    """What a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def first_causes(server: Server) -> list[str]:
    return re.findall(r"first cause: .*", server.log)


# ----------------------------------------------------------------------------------------- life


def test_ranks_are_actors_and_workers_are_their_children(nodes: RayNodes) -> None:
    """Titles as the formula has them, nice level 0, no Ray in API servers and workers; answers
    come from both ranks; everything has left with the server."""
    flags = (*TWO_RANKS, "--ray-address", nodes.address)
    with running_server("scripted", *flags, env=nodes.environment) as server:
        titles = Counter(p.title.partition(".")[0] for p in nodes.actors())
        assert titles == {
            "ray::DPCoordinator": 1,
            "ray::EngineCore_DP0": 1,
            "ray::EngineCore_DP1": 1,
            "RAYWIRE::Worker_DP0_PP0_TP0": 1,
            "RAYWIRE::Worker_DP1_PP0_TP0": 1,
        }
        api_servers = server.raywire_processes()
        assert sorted(api_servers) == ["RAYWIRE::APIServer_0", "RAYWIRE::APIServer_1"]
        for process in nodes.actors():
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == 0, process
        for process in [*nodes.processes("RAYWIRE::"), *api_servers.values()]:
            assert "_raylet" not in Path(f"/proc/{process.pid}/maps").read_text(), process
        for rank in ("0", "1"):
            assert complete(server, f"to {rank}", **{"X-data-parallel-rank": rank}) == f"to {rank}"

        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not nodes.actors()
        assert first_causes(server) == []


@pytest.mark.parametrize("num_api_servers", ["1", "2"])
def test_ranks_on_two_nodes_are_reached_over_tcp(
    nodes: RayNodes, tmp_path: Path, num_api_servers: str
) -> None:
    """One rank a node; the script travels to the node that is not the command's; engine cores
    listen nowhere, the API server on its HTTP port and on the address that Ray uses."""
    script = tmp_path / "script.json"
    script.write_text('{"kind": "tokens", "token_ids": [111, 107, 257]}')
    one_each = ("--data-parallel-size-local", "1", "--api-server-count", num_api_servers)
    flags = (*TWO_RANKS, *one_each, "--ray-address", nodes.address)
    with running_server(f"scripted:{script}", *flags, env=nodes.environment) as server:
        assert set(re.findall(r"placed rank=(\d) node=\S+ \((\S+?)[,)]", server.log)) == {
            ("0", "127.0.0.3"),
            ("1", "127.0.0.4"),
        }
        for rank in ("0", "1"):
            assert complete(server, **{"X-data-parallel-rank": rank}) == "ok"
        server.wait_for_log(rf"serving at http://127\.0\.0\.3:{server.port}\n")


def test_an_external_server_runs_its_own_rank(nodes: RayNodes) -> None:
    """One rank of two, with an endpoint of its own; there is nothing to coordinate."""
    flags = (*TWO_RANKS, "--data-parallel-rank", "1", "--ray-address", nodes.address)
    with running_server("scripted", *flags, env=nodes.environment) as server:
        titles = sorted(p.title.partition(".")[0] for p in nodes.actors())
        assert titles == ["RAYWIRE::Worker_DP1_PP0_TP0", "ray::EngineCore_DP1"]
        assert complete(server, **{"X-data-parallel-rank": "1"}) == "hello"


@pytest.mark.row("F-52")
def test_a_stop_while_the_model_loads_leaves_nothing(nodes: RayNodes) -> None:
    """Actors in the middle of a load are not waited for."""
    flags = (*TWO_RANKS, "--ray-address", nodes.address)
    with running_server(
        "scripted", *flags, env=nodes.environment, is_ready_awaited=False, may_leave_files=True
    ) as server:
        server.wait_for_log("started engine core EngineCore_DP1")
        server.signal(signal.SIGTERM)

        assert server.wait(15) == 0


# ---------------------------------------------------------------------------------------- death


@pytest.mark.parametrize("title", ["ray::EngineCore_DP1", "ray::DPCoordinator"])
def test_a_killed_actor_ends_the_server_with_one_first_cause(nodes: RayNodes, title: str) -> None:
    """Ray tells, and the line names actor, node and pid."""
    flags = (*TWO_RANKS, "--ray-address", nodes.address)
    with running_server("scripted", *flags, env=nodes.environment) as server:
        [victim] = nodes.processes(title)
        os.kill(victim.pid, signal.SIGKILL)

        assert server.wait() == 1
        [line] = first_causes(server)
        assert title.removeprefix("ray::") in line
        assert "127.0.0.3" in line
        assert f"pid={victim.pid}" in line


def test_a_killed_worker_ends_the_server_with_one_first_cause(nodes: RayNodes) -> None:
    """The engine core sees it, says so in the log of the command, and ends in order."""
    flags = (*TWO_RANKS, "--ray-address", nodes.address)
    with running_server("scripted", *flags, env=nodes.environment) as server:
        [victim] = nodes.processes("RAYWIRE::Worker_DP0")
        os.kill(victim.pid, signal.SIGKILL)

        assert server.wait() == 1
        assert len(first_causes(server)) == 1, server.log
        [line] = first_causes(server)
        assert re.search(rf"pid={victim.pid} node=\S+ killed by SIGKILL", line)


def test_a_killed_command_takes_its_actors_with_it(nodes: RayNodes) -> None:
    """Nobody has told them to stop: Ray ends them, and they end their workers."""
    flags = (*TWO_RANKS, "--ray-address", nodes.address)
    with running_server("scripted", *flags, env=nodes.environment, may_leave_files=True) as server:
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        wait_for(lambda: not nodes.actors(), "the actors end", 10)
        wait_for(lambda: not server.processes(), "its API servers end", 10)
        # In the middle of its end a process shows its name in brackets.
        wait_for(lambda: not nodes.processes("RAYWIRE::"), "the workers end", 10)


# ------------------------------------------------------------------------------------- refusals


def refusal(*flags: str, env: dict[str, str], timeout_s: float = 60) -> str:
    """The one line of a server that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "serve", "scripted", "--port", "0", *flags],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return line


@pytest.mark.row("F-20")
def test_ranks_that_cannot_fit_are_refused_with_a_comparison(nodes: RayNodes) -> None:
    """In one line, and each node's part in it."""
    too_many = 2 * NUM_CPUS + 1
    line = refusal(
        "-dp", str(too_many), "--ray-address", nodes.address, env=nodes.environment, timeout_s=90
    )

    assert f"{too_many} ranks" in line
    assert line.count(f"has {NUM_CPUS} CPUs") == 2


@pytest.mark.row("F-20")
def test_a_full_cluster_is_waited_for_until_the_deadline(nodes: RayNodes) -> None:
    """The comparison has what is free, and what there is."""
    flags = ("--ray-address", nodes.address)
    with running_server(
        "scripted",
        "-dp",
        str(2 * NUM_CPUS - 1),
        "--api-server-count",
        "1",
        *flags,
        env=nodes.environment,
        is_ready_awaited=False,
        may_leave_files=True,
    ) as server:
        server.wait_for_log("started engine core EngineCore_DP6")
        line = refusal("-dp", "2", "--placement-timeout", "1", *flags, env=nodes.environment)

    assert "free of 4 CPUs" in line
    assert "--placement-timeout" in line


@pytest.mark.row("S-39")
def test_a_wrong_token_is_refused_in_one_line(nodes: RayNodes) -> None:
    """Ray tries for 20 s before it believes it."""
    wrong = {**nodes.environment, "RAY_AUTH_TOKEN": "0" * 64}

    line = refusal("--ray-address", nodes.address, env=wrong, timeout_s=50)

    assert "RAY_AUTH_TOKEN" in line


# ----------------------------------------------------------------------------- a cluster of our own


def test_no_ray_call_is_on_the_path_of_tokens(tmp_path: Path) -> None:
    """While 20 streams run, the command, which is their API server too, calls nothing of Ray. And
    the cluster that it has started for itself ends with it, on Ctrl-C as well."""
    calls = tmp_path / "calls"
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        env = {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, counted_ray.FILE_VARIABLE: str(calls)}
        flags = (*TWO_RANKS, "--api-server-count", "1", "--data-parallel-backend", "ray")
        with running_server("scripted", *flags, env=env, module=counted_ray.__name__) as server:
            before = calls.read_text()
            for number in range(20):
                assert stream(server, f"number {number}") == f"number {number}"

            assert calls.read_text() == before
            assert {"get", "wait", "remote"} <= set(before.split())

            server.interrupt()  # as Ctrl-C does: Ray's processes get it too, and ignore it
            assert server.wait() == 0


def test_a_stop_does_not_wait_for_a_cluster_that_has_gone() -> None:
    """A SIGTERM to the whole group, as `timeout` sends it, ends a cluster of our own at once. Ray's
    calls then wait for its head; the command does not."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        env = {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder}
        flags = (*TWO_RANKS, "--data-parallel-backend", "ray")
        with running_server("scripted", *flags, env=env) as server:
            os.killpg(server.process.pid, signal.SIGTERM)

            assert server.wait(25) in (0, 1)  # whether the stop or the death is seen first


@pytest.mark.parametrize("is_group_killed", [False, True], ids=["alone", "group"])
def test_a_killed_command_takes_its_cluster_with_it(is_group_killed: bool) -> None:
    """All that is ours in it and all that is Ray's, and the folder; also where the signal is for
    the whole group, as with `kill -9 %1`."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        env = {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder}
        flags = (*TWO_RANKS, "--data-parallel-backend", "ray")
        with running_server("scripted", *flags, env=env) as server:
            assert len(ours(server)) == 7
            assert os.listdir(folder)
            kill = os.killpg if is_group_killed else os.kill
            kill(server.process.pid, signal.SIGKILL)
            server.wait()
            server.assert_gone(20)
            assert not os.listdir(folder)


def ours(server: Server) -> list[Process]:
    return [p for p in server.processes() if re.match(r"ray::(Engine|DPC)|RAYWIRE::", p.title)]


def stream(server: Server, prompt: str) -> str:
    body = completion_body(prompt=prompt, max_tokens=64, stream=True)
    with server.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
        events = list(read_events(response))
    return "".join(event["choices"][0]["text"] for event in events)
