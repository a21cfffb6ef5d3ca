"""Nodes of a Ray cluster that die or are cut off under load: what clients, operators and the other
nodes see of it. In the default mode the server ends; with `replace` it goes on.

One cluster of three hosts, from which the tests take away: they go from cut links to dead nodes.
Ray is set to notice neither for minutes, as it does unless told otherwise, so that what is seen is
our own doing.
"""

import random
import re
import time
from collections.abc import Iterator

import pytest

from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import wait_for
from tests.helpers.streams import BackgroundStream
from tests.integration.hosts import Host, hosts
from tests.integration.ray_cluster import OURS, ClusterServer, RayCluster, ray_cluster, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CUT_S = 60.0
NOTICED_S = 30.0
"""Ten without a heartbeat, and the cores of a test machine."""

ONE_EACH = ("-dp", "2", "--data-parallel-size-local", "1", "--api-server-count", "1")
REPLACE = ("--on-engine-death", "replace")

SLOW_RAY = {
    "RAY_health_check_failure_threshold": "40",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "150",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with hosts(3) as machines:
        yield ray_cluster(machines, environment=SLOW_RAY)


@pytest.fixture(autouse=True)
def _on_the_head(cluster: RayCluster) -> Iterator[None]:
    with cluster.head.network():
        yield


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Says what it was told, 50 tokens a second: a token that is lost, doubled or somebody else's
    is heard."""
    folder = tmp_path_factory.mktemp("models")
    return str(make_scripted_model(folder, kind="echo", step_delay_s=0.02))


def letters(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=count))


def on_rank(server: ClusterServer, rank: int, prompt: str) -> BackgroundStream:
    headers = {"X-data-parallel-rank": str(rank)}
    return BackgroundStream(server, headers, prompt=prompt, max_tokens=len(prompt) + 50)


def host_of_rank(server: ClusterServer, rank: int) -> Host:
    """Where its engine core runs now."""
    title = f"ray::EngineCore_DP{rank}"
    living = [host for host in server.cluster.hosts if host.is_up]
    found = [h for h in living if any(p.args.startswith(title) for p in h.processes())]
    assert len(found) == 1, (rank, found)
    return found[0]


def nothing_of_ours(host: Host) -> bool:
    return not any(OURS.match(process.args) for process in host.processes())


def assert_first_cause(log: str, *words: str) -> None:
    causes = re.findall(r"first cause: .*", log)
    assert len(causes) == 1, causes
    assert all(word in causes[0] for word in words), causes


@pytest.mark.row("F-15")
def test_a_cut_link_ends_the_server_and_what_is_beyond_it(cluster: RayCluster, echo: str) -> None:
    """By default. Heartbeats are missed after ten seconds, streams get one error, the log one first
    cause; the engine core beyond lives until the link heals, and no longer."""
    with serving(cluster, echo, *ONE_EACH, port=8001) as server:
        far = host_of_rank(server, 1)
        streams = [on_rank(server, rank, letters(rank, 4000)) for rank in range(2)]
        assert all(stream.started.wait(30) for stream in streams)
        far.cut()
        try:
            for stream in streams:
                stream.join(NOTICED_S)
                assert (stream.failure, len(stream.errors)) == (None, 1)
            assert server.job.wait() == "FAILED"
            assert server.job.exit_code == 1
            assert_first_cause(server.job.log, "engine core DP1", "hung: no heartbeat")
            assert not nothing_of_ours(far)
        finally:
            far.heal()
        wait_for(lambda: nothing_of_ours(far), "it has ended beyond the link too", 30)
    wait_for(lambda: not cluster.living("actors"), "no actor is left", 20)
    assert cluster.living("placement_groups") == []


@pytest.mark.row("F-15")
def test_a_rank_beyond_a_cut_link_is_replaced_and_fenced(cluster: RayCluster, echo: str) -> None:
    """With `replace`: its streams go on elsewhere, token for token; another takes its place on a
    node that can be reached. After 60 s the link heals: the old one is not heard, and ends."""
    with serving(cluster, echo, *ONE_EACH, *REPLACE, port=8002) as server:
        far = host_of_rank(server, 1)
        prompts = [letters(seed, 600) for seed in range(4)]
        streams = [on_rank(server, seed % 2, prompt) for seed, prompt in enumerate(prompts)]
        assert all(stream.started.wait(30) for stream in streams)
        far.cut()
        began = time.monotonic()
        try:
            assert_continued(streams, prompts)
            server.job.wait_for_log("engine core DP1 is back under epoch 1")
            assert time.monotonic() - began < CUT_S, "it was not the healing that brought it back"
            assert not nothing_of_ours(far), "Ray has ended it before we could fence it"
            over_it = letters(9, 1500)
            at_the_time = on_rank(server, 1, over_it)
            time.sleep(max(0.0, CUT_S - (time.monotonic() - began)))  # that is the fault
        finally:
            far.heal()
        wait_for(lambda: nothing_of_ours(far), "the old one ends", 60)
        assert_continued([at_the_time], [over_it])
        assert host_of_rank(server, 1) is not far
        assert_first_cause(server.job.log, "engine core DP1", "hung: no heartbeat")


@pytest.mark.row("F-13")
def test_ranks_of_a_dead_node_are_placed_on_what_is_left(cluster: RayCluster, echo: str) -> None:
    """With `replace`: as the death of an engine core, and the log says where it is now."""
    with serving(cluster, echo, *ONE_EACH, *REPLACE, port=8003) as server:
        lost = host_of_rank(server, 1)
        prompts = [letters(seed, 600) for seed in range(4)]
        streams = [on_rank(server, seed % 2, prompt) for seed, prompt in enumerate(prompts)]
        assert all(stream.started.wait(30) for stream in streams)
        lost.crash()
        assert_continued(streams, prompts)
        server.job.wait_for_log("engine core DP1 is back under epoch 1")
        again = on_rank(server, 1, "and again")
        again.join(30)
        assert again.text == "and again"
        assert host_of_rank(server, 1) is not lost
        where = re.findall(r"placed rank=1 epoch=1 node=\S+ \((\S+?)[,)]", server.job.log)
        assert where == [host_of_rank(server, 1).address]
        assert_first_cause(server.job.log, "EngineCore_DP1")


def assert_continued(streams: list[BackgroundStream], prompts: list[str]) -> None:
    for stream in streams:
        stream.join(120)
        assert (stream.failure, stream.errors, stream.finish_reasons) == (None, [], ["stop"])
    assert [stream.text for stream in streams] == prompts


@pytest.mark.row("F-13")
def test_a_dead_node_ends_the_server(cluster: RayCluster, echo: str) -> None:
    """By default: streams get one error, the log has one first cause, and nothing is left or
    reserved on the nodes that live. What needs more nodes than there are is refused, with the
    reason."""
    with serving(cluster, echo, *ONE_EACH, port=8004) as server:
        lost = host_of_rank(server, 1)
        streams = [on_rank(server, rank, letters(rank, 4000)) for rank in range(2)]
        assert all(stream.started.wait(30) for stream in streams)
        lost.crash()
        for stream in streams:
            stream.join(NOTICED_S)
            assert (stream.failure, len(stream.errors)) == (None, 1)
        assert server.job.wait() == "FAILED"
        assert server.job.exit_code == 1
        assert_first_cause(server.job.log, "DP1")
    wait_for(lambda: nothing_of_ours(cluster.head), "nothing is left", 20)
    assert cluster.living("placement_groups") == []
