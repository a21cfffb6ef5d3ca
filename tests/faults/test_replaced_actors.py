"""--on-engine-death replace on a Ray cluster: an actor that dies is a pause for its streams."""

import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import killing_ray
from tests.helpers.ray_nodes import RayNodes, ray_nodes
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream

pytestmark = [pytest.mark.slow, pytest.mark.row("F-04"), pytest.mark.timeout(300)]

RETURN_S = 60.0
"""For another actor to come up, load and take requests."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2) as cluster:
        yield cluster
        assert cluster.reservations() == []


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each line that is written into it makes Ray kill rank 1."""
    path = tmp_path_factory.mktemp("pipe") / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def server(
    nodes: RayNodes, pipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A rank on each of two nodes, so over encrypted TCP. They say what they are told."""
    model = make_scripted_model(tmp_path_factory.mktemp("m"), kind="echo", step_delay_s=0.02)
    flags = ("-dp", "2", "--data-parallel-size-local", "1", "--served-model-name", "m")
    more = ("--on-engine-death", "replace", "--ray-address", nodes.address)
    env = {**nodes.environment, killing_ray.PIPE_VARIABLE: str(pipe)}
    with running_server(str(model), *flags, *more, env=env, module=killing_ray.__name__) as server:
        yield server


def kill_process(nodes: RayNodes, _: Path) -> None:
    [victim] = nodes.processes("ray::EngineCore_DP1")
    os.kill(victim.pid, signal.SIGKILL)


def kill_by_ray(_: RayNodes, pipe: Path) -> None:
    pipe.write_text("now\n")


def stop_process(nodes: RayNodes, _: Path) -> None:
    [victim] = nodes.processes("ray::EngineCore_DP1")
    os.kill(victim.pid, signal.SIGSTOP)  # it hangs, and is not heard for ten seconds


@pytest.mark.parametrize("kill", [kill_process, kill_by_ray, stop_process])
def test_a_killed_actor_is_a_pause(
    server: Server, nodes: RayNodes, pipe: Path, kill: Callable[[RayNodes, Path], None]
) -> None:
    """Its streams go on at the other rank, token for token. Another actor takes its place under the
    next epoch, with a key of its own, and is given requests again."""
    prompts = ["".join(random.Random(seed).choices("abcdefgh", k=300)) for seed in range(4)]
    epoch = len(re.findall("is back under epoch", server.log)) + 1
    [before] = nodes.processes("ray::EngineCore_DP0")
    streams = [on_rank(server, 1, prompt=prompt, max_tokens=400) for prompt in prompts]
    assert all(stream.started.wait(30) for stream in streams)

    kill(nodes, pipe)
    for stream in streams:
        stream.join(90)
        assert (stream.failure, stream.errors, stream.finish_reasons) == (None, [], ["stop"])
    assert [stream.text for stream in streams] == prompts
    server.wait_for_log(rf"engine core DP1 is back under epoch {epoch}", RETURN_S)
    again = on_rank(server, 1, prompt="and again", max_tokens=20)
    again.join(30)
    assert again.text == "and again"
    assert [each.pid for each in nodes.processes("ray::EngineCore_DP0")] == [before.pid]
    assert len(re.findall("first cause: engine core (?:EngineCore_)?DP1", server.log)) == epoch


def on_rank(server: Server, rank: int, **fields: object) -> BackgroundStream:
    return BackgroundStream(server, {"X-data-parallel-rank": str(rank)}, **fields)


@pytest.mark.row("F-09")
def test_a_killed_coordinator_is_replaced_where_it_was(
    server: Server, nodes: RayNodes, pipe: Path
) -> None:
    """At its ports and with its keys: streams do not notice, and a rank that is replaced after it
    is let in by the new one."""
    [victim] = nodes.processes("ray::DPCoordinator")
    prompt = "".join(random.Random(9).choices("abcdefgh", k=300))
    stream = on_rank(server, 0, prompt=prompt, max_tokens=400)
    assert stream.started.wait(30)

    os.kill(victim.pid, signal.SIGKILL)
    stream.join(60)
    assert (stream.text, stream.errors) == (prompt, [])
    server.wait_for_log(rf"first cause: coordinator DPCoordinator node=.* pid={victim.pid} died")
    wait_for(lambda: len(re.findall("started coordinator", server.log)) == 2, "another", RETURN_S)
    test_a_killed_actor_is_a_pause(server, nodes, pipe, kill_process)
    [successor] = nodes.processes("ray::DPCoordinator")
    assert successor.pid != victim.pid
    assert "refused a connection" not in server.log


def test_what_is_left_is_what_serves(server: Server, nodes: RayNodes) -> None:
    """After all that: two engine cores, their workers and the coordinator, and a place for each
    rank."""
    expected = [
        "RAYWIRE::Worker_DP0_PP0_TP0",
        "RAYWIRE::Worker_DP1_PP0_TP0",
        "ray::DPCoordinator",
        "ray::EngineCore_DP0",
        "ray::EngineCore_DP1",
    ]

    def titles() -> list[str]:
        return sorted(p.title.partition(".")[0] for p in nodes.actors())

    wait_for(lambda: titles() == expected, "those that serve, and nobody else", 20)
    wait_for(lambda: len(nodes.reservations()) == 2, "two reservations", 20, interval_s=1.0)
