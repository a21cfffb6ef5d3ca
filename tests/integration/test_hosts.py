"""Several hosts, one Ray cluster, one endpoint: the server as a job, seen from every host.

What one machine can show of a real cluster: own addresses, own processes, own shared memory, and
links that can be cut. One cluster serves all tests but the one of IPv6, and most of them share one
server. Each test runs in the network of the head, where the server's address is reached.
"""

import itertools
import json
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from api.tokenizer import Tokenizer
from cluster.plan import Topology
from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import wait_for
from tests.helpers.streams import BackgroundStream
from tests.helpers.tiny_models import clear_prompts, greedy_tokens, tiny_model
from tests.integration.hosts import Connection, Host, hosts
from tests.integration.ray_cluster import (
    WORKER_PORTS,
    ClusterServer,
    RayCluster,
    ray_cluster,
    serving,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOPOLOGY = Topology(tensor_parallel_size=2, data_parallel_size=2, api_server_count=1)
WIRE_PORTS = range(24000, 24100)
ONE_EACH = ("-dp", "2", "--data-parallel-size-local", "1")
"""Two ranks, one on each host."""

WIRES = ("--wire-port-range", f"{WIRE_PORTS.start}-{WIRE_PORTS.stop - 1}")


_RAYS_OWN = ("ray::IDLE", "sleep 1")
"""Processes that come and go: spare workers, and the clock of the shell that watches a job."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with hosts(2) as machines:
        yield ray_cluster(machines)


@pytest.fixture(autouse=True)
def _on_the_head(cluster: RayCluster) -> Iterator[None]:
    with cluster.head.network():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in float32, where every host sees it."""
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speaks for ever, at 50 tokens a second."""
    return make_slow_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(cluster: RayCluster, folder: Path) -> Iterator[ClusterServer]:
    """Two ranks of two workers, one API server."""
    flags = (*ONE_EACH, *WIRES, "-tp", "2", "--api-server-count", "1", "--dtype", "float32")
    with serving(cluster, str(folder), *flags, port=8001) as it:
        yield it


def pinned(rank: int) -> dict[str, str]:
    return {"X-data-parallel-rank": str(rank)}


def inventory(cluster: RayCluster) -> dict[str, str]:
    """What a job may leave behind, by a name that does not change: actors, placement groups,
    processes but those of Ray's own, segments, files."""
    found = {f"actor {each['actor_id']}": each["name"] for each in cluster.living("actors")}
    for group in cluster.living("placement_groups"):
        found[f"group {group['placement_group_id']}"] = group["name"]
    for host in cluster.hosts:
        for process in host.processes():
            if not process.args.startswith(_RAYS_OWN):
                found[f"process {process.pid} of {host.name}"] = process.args
        for name in [*host.shm_segments(), *host.temporary_files()]:
            found[f"file {name} of {host.name}"] = ""
    return found


def assert_nothing_left(cluster: RayCluster, before: dict[str, str]) -> None:
    """Within 20 s there is nothing that was not there before."""

    def left() -> list[tuple[str, str]]:
        return [(name, text) for name, text in inventory(cluster).items() if name not in before]

    try:
        wait_for(lambda: not left(), "nothing is left", 20, interval_s=0.5)
    except AssertionError:
        assert left() == []


def test_actors_of_two_hosts_share_a_network_and_nothing_else(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Plain Ray, as a check of the hosts: each actor has its host's name, address and memory, and
    calls that a cut link holds up go on when it heals."""
    one, two = cluster.hosts
    env = {**cluster.environment, "RAY_ADDRESS": cluster.address}
    log = tmp_path / "log"
    probe = ("-m", "tests.helpers.ray_probe", *(host.name for host in cluster.hosts))
    driver = one.popen("python", *probe, env=env, log=log)

    def num_rounds() -> int:
        assert driver.poll() is None, log.read_text()
        return len(re.findall(r"^\d+$", log.read_text(), re.MULTILINE))

    wait_for(lambda: num_rounds() > 100, "both actors answer", 60)
    looks = [json.loads(line) for line in re.findall(r"^\{.*\}$", log.read_text(), re.MULTILINE)]
    assert [look["host"] for look in looks] == ["node1", "node2"]
    assert [look["address"] for look in looks] == [one.address, two.address]
    assert [look["shm"] for look in looks] == [["probe-node1"], ["probe-node2"]]

    two.cut()
    before = num_rounds()
    time.sleep(5)  # no condition: a link that is cut for so long is the case
    assert num_rounds() <= before + 1
    two.heal()
    wait_for(lambda: num_rounds() > before + 100, "the calls go on", 20)
    assert len(cluster.alive_nodes()) == 2

    pids = [p.pid for p in one.processes() if "ray_probe" in p.args]
    one.run("kill", *map(str, pids))
    driver.wait(20)
    wait_for(lambda: not cluster.living("actors"), "the actors end with their driver", 20)
    for host in (one, two):
        host.run("sh", "-c", "rm /dev/shm/probe-*")


def test_two_hosts_answer_as_one_process_does(server: ClusterServer, folder: Path) -> None:
    """The same greedy text from either rank as from plain transformers, for an unmodified client,
    at once and as a stream."""
    prompts = clear_prompts(folder, 3, 12)
    tokenizer = Tokenizer.load(folder)
    arguments: dict[str, Any] = {
        "model": "m",
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for prompt in prompts:
            expected = tokenizer.decode(greedy_tokens(folder, prompt, 12))
            for rank in range(2):
                completions = client.with_options(default_headers=pinned(rank)).completions
                whole = completions.create(prompt=prompt, **arguments)
                chunks = completions.create(prompt=prompt, stream=True, **arguments)
                streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

                assert whole.choices[0].text == expected, rank
                assert streamed == expected, rank


def test_processes_on_all_hosts_are_those_of_the_formula(server: ClusterServer) -> None:
    """`ps` over all hosts, as the README counts; workers are where their engine core is."""
    per_host = [[p.args for p in server.processes(host)] for host in server.cluster.hosts]

    assert sum(map(len, per_host)) == TOPOLOGY.num_processes, per_host
    for host_rank, titles in enumerate(per_host):
        workers = [title for title in titles if "Worker" in title]
        assert len(workers) == TOPOLOGY.workers_per_engine
        (core,) = [title for title in titles if "EngineCore" in title]
        rank = re.findall(r"EngineCore_DP(\d)", core)[0]
        assert all(f"_DP{rank}_" in worker for worker in workers), titles
        assert any("APIServer" in title for title in titles) == (host_rank == 0)


@pytest.mark.row("F-21", "S-04", "S-05")
def test_nothing_of_ours_listens_but_http_and_wires(server: ClusterServer) -> None:
    """On any host; Ray's own listeners in our processes are where it was told to have them. Wires
    are bound to the one address that is advertised."""
    one, two = server.cluster.hosts
    ours = {host: {p.pid for p in server.processes(host)} for host in (one, two)}
    listening = {
        host: {
            (each.address, each.port)
            for each in host.listening()
            if each.pid in ours[host] and each.port not in WORKER_PORTS
        }
        for host in (one, two)
    }
    wires = {each for each in listening[one] if each[1] in WIRE_PORTS}

    assert {address for address, _ in wires} == {one.address}
    assert listening[one] - wires == {("0.0.0.0", server.port)}
    assert listening[two] == set()


def engine_traffic(server: ClusterServer, host: Host) -> tuple[int, int]:
    """Bytes that a host's engine core and workers have had over the network: on the wires, and on
    anything else."""
    pids = {p.pid for p in server.processes(host)}
    connections = [each for each in host.connections() if each.pid in pids]

    def is_wire(each: Connection) -> bool:
        head = server.cluster.head.address
        return each.peer[0] == head and each.peer[1] in WIRE_PORTS

    on_wires = sum(each.num_bytes for each in connections if is_wire(each))
    return on_wires, sum(each.num_bytes for each in connections) - on_wires


def test_tokens_travel_on_the_wires_alone(server: ClusterServer) -> None:
    """A long stream moves the counters of the advertised ports, and hardly those of Ray's
    connections."""
    _, two = server.cluster.hosts
    wires_before, others_before = engine_traffic(server, two)
    stream = BackgroundStream(server, pinned(1), max_tokens=400, ignore_eos=True)
    stream.join(60)
    wires_after, others_after = engine_traffic(server, two)

    assert stream.finish_reasons == ["length"]
    on_wires, on_others = wires_after - wires_before, others_after - others_before
    assert on_wires > 400 * 20  # an output of one token has more bytes than that
    assert on_others < on_wires / 4, (on_wires, on_others)


@pytest.mark.row("F-17")
def test_a_far_host_costs_its_distance_once(server: ClusterServer) -> None:
    """200 ms each way, and a packet in a hundred lost: the same tokens; the first is later by the
    way there and back, and between two there is no more time than without."""
    _, two = server.cluster.hosts
    fields: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    near = BackgroundStream(server, pinned(1), **fields)
    near.join(60)

    with two.far_away(0.2, loss=0.01, seed=1):
        began = time.monotonic()
        far = BackgroundStream(server, pinned(1), **fields)
        far.join(120)
        with server.http() as client:
            assert client.get("/health").status_code == 200

    assert (far.text, far.finish_reasons, far.errors) == (near.text, ["length"], [])
    assert far.started_at - began >= 0.4
    assert median_gap_s(far) < median_gap_s(near) + 0.1


def median_gap_s(stream: BackgroundStream) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(stream.arrived_at))


@pytest.mark.row("F-14")
def test_a_cut_link_holds_streams_up_and_no_more(server: ClusterServer) -> None:
    """5 s without a network: the rank here goes on, the one beyond pauses, then says the rest.
    Nobody takes it for dead, and no token is lost."""
    _, two = server.cluster.hosts
    fields: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True}
    whole = BackgroundStream(server, pinned(0), **fields)
    whole.join(60)

    far = BackgroundStream(server, pinned(1), **fields)
    assert far.started.wait(20)
    two.cut()
    near = BackgroundStream(server, pinned(0), **fields)
    time.sleep(1)  # what was under way has arrived
    num_events = len(far.events)
    time.sleep(4)  # no condition: a link that is cut for so long is the case
    assert len(far.events) == num_events
    two.heal()
    far.join(30)
    near.join(30)

    assert num_events < len(whole.events)
    assert (far.text, near.text) == (whole.text, whole.text)
    assert (far.finish_reasons, far.errors) == (["length"], [])
    with server.http() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.row("F-50")
def test_job_stop_drains_and_leaves_nothing(cluster: RayCluster, slow_model: Path) -> None:
    """The running streams of both ranks end as if nothing were; then no actor, placement group,
    process, segment or file is left on any host."""
    before = inventory(cluster)
    with serving(cluster, str(slow_model), *ONE_EACH, "-tp", "2", port=8002) as server:
        streams = [BackgroundStream(server, pinned(rank), max_tokens=200) for rank in range(2)]
        assert all(stream.started.wait(20) for stream in streams)
        assert len(cluster.living("placement_groups")) >= 1
        server.job.stop()

        for stream in streams:
            stream.join()
            assert stream.finish_reasons == ["length"]
        assert server.job.status == "STOPPED"
    assert_nothing_left(cluster, before)
    assert not re.search(r"^ERROR|Traceback|first cause", server.job.log, re.MULTILINE)


@pytest.mark.row("F-20")
def test_too_large_a_server_is_refused_with_what_there_is(cluster: RayCluster) -> None:
    """Within 30 s; the log compares what was asked for with what each node has."""
    before = inventory(cluster)
    job = cluster.submit("serve", "scripted", "-dp", "4", "-tp", "4", "--port", "8003")
    began = time.monotonic()

    assert job.wait() == "FAILED"
    assert time.monotonic() - began < 30
    assert job.exit_code == 2
    assert all(host.address in job.log for host in cluster.hosts), job.log
    assert "Traceback" not in job.log
    assert_nothing_left(cluster, before)


def test_an_address_without_a_cluster_is_one_line(cluster: RayCluster) -> None:
    """Within 30 s, though Ray itself would try for minutes."""
    began = time.monotonic()
    serve = ("python", "-m", "cluster", "serve", "scripted", "--port", "8004", *ONE_EACH)
    nobody = ("--ray-address", "10.77.0.99:6379")
    result = cluster.head.run(*serve, *nobody, env=cluster.environment, check=False)

    assert result.returncode == 2
    assert time.monotonic() - began < 30
    assert "10.77.0.99:6379" in result.stdout.splitlines()[-1]
    assert "Traceback" not in result.stdout


@pytest.mark.row("F-21")
def test_a_cluster_of_ipv6_addresses() -> None:
    """The wires are bound to such an address, and tokens travel over it."""
    with hosts(2, is_ipv6=True) as machines:
        cluster = ray_cluster(machines)
        flags = (*ONE_EACH, *WIRES, "--host", cluster.head.address, "--api-server-count", "1")
        with serving(cluster, "scripted", *flags, port=8005) as server, cluster.head.network():
            streams = [BackgroundStream(server, pinned(rank), prompt="abc") for rank in range(2)]
            for stream in streams:
                stream.join()
                assert (stream.text, stream.finish_reasons) == ("abc", ["stop"])
            on_wires, _ = engine_traffic(server, machines[1])
            assert on_wires > 0
