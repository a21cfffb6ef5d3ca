"""A stranger at every wire of a server whose ranks are on two nodes."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.helpers.listeners import listening
from tests.helpers.ray_nodes import RayNodes, ray_nodes
from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import ROOT, Server, running_server
from tests.helpers.stranger import GREETING_BYTES
from tests.helpers.streams import completion_body, metric

NUM_TOKENS = 100
STEP_S = 0.02
WIRE_PORTS = range(24300, 24360)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.row("S-17", "S-04")
def test_strangers_at_every_wire_of_a_server_slow_nobody(nodes: RayNodes, tmp_path: Path) -> None:
    """Two ranks on two nodes, so that all wires are TCP: on one address, HTTP apart. A stranger at
    each of them hears nothing, and streams are as quick beside it as without, within 10%."""
    model = make_slow_model(tmp_path, STEP_S)
    wire_ports = f"{WIRE_PORTS.start}-{WIRE_PORTS.stop - 1}"  # Ray has listeners beside ours
    flags = ["-dp", "2", "--data-parallel-size-local", "1", "--served-model-name", "m"]
    flags += ["--wire-port-range", wire_ports]
    with running_server(
        str(model), *flags, "--ray-address", nodes.address, env=nodes.environment
    ) as server:
        wires = wires_of(server, nodes)
        assert len(wires) == 2 * 2 + 3
        assert {host for host, _ in wires} == {"127.0.0.3"}
        ports = sorted(port for _, port in wires)
        with contextlib.closing(server.http()) as client:
            seconds: dict[bool, list[float]] = {False: [], True: []}
            one_stream(client)
            for _ in range(3):
                seconds[False].append(one_stream(client))
                with stranger_at("127.0.0.3", ports) as heard:
                    seconds[True].append(one_stream(client))
                assert heard["messages"] == 0
                assert heard["bytes"] <= GREETING_BYTES
        assert metric(server, "raywire:wire_refused_connections") > 0
    assert min(seconds[True]) < 1.1 * min(seconds[False]), seconds


def wires_of(server: Server, nodes: RayNodes) -> set[tuple[str, int]]:
    """Where our processes listen for each other."""
    processes = [*server.processes(), *nodes.processes("ray::DPCoordinator")]
    found = {(address, port) for _, address, port in listening(processes)}
    return {each for each in found if each[1] in WIRE_PORTS}


def one_stream(client: Any) -> float:
    """Seconds of a stream of so many tokens, on each rank in turn."""
    began = time.monotonic()
    for rank in ("0", "1"):
        answer = client.post(
            "/v1/completions",
            json=completion_body(max_tokens=NUM_TOKENS, ignore_eos=True),
            headers={"X-data-parallel-rank": rank},
        )
        assert answer.status_code == 200, answer.text
    return time.monotonic() - began


@contextlib.contextmanager
def stranger_at(host: str, ports: Sequence[int]) -> Iterator[dict[str, int]]:
    """As a process of its own. What it has heard is there after the block."""
    heard: dict[str, int] = {}
    key = zmq.curve_keypair()[0].decode()
    command = [sys.executable, "-m", "tests.helpers.stranger", host, key, *map(str, ports)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "knocked\n"
            yield heard
            heard |= json.loads(process.communicate(timeout=30)[0])
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.row("S-04")
def test_on_one_node_of_ray_nothing_is_added_to_rays_own() -> None:
    """Two ranks as actors: API servers have the HTTP port, workers nothing, and an actor what any
    actor of Ray has."""
    with ray_nodes(1) as nodes:
        flags = ("-dp", "2", "--ray-address", nodes.address)
        with running_server("scripted", *flags, env=nodes.environment) as server:
            ours = [p for p in server.processes() if p.title.startswith("RAYWIRE::")]
            assert {port for *_, port in listening(ours)} == {server.port}
            assert list(listening(nodes.processes("RAYWIRE::Worker"))) == []
            actors = nodes.processes("ray::EngineCore") + nodes.processes("ray::DPCoordinator")
            assert len(actors) == 3
            for actor in actors:
                found = list(listening([actor]))
                assert len(found) <= 1, found
                assert all(address != "0.0.0.0" for _, address, _ in found)
