"""Hybrid balancing on a Ray cluster: every host has a server of its own."""

from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from tests.helpers.server import wait_for
from tests.helpers.streams import completion_body
from tests.integration.hosts import Host, hosts
from tests.integration.ray_cluster import Job, RayCluster, ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PORT = 8002


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with hosts(2) as machines:
        yield ray_cluster(machines)


def submit(cluster: RayCluster, *flags: str) -> Job:
    return cluster.submit(
        *("serve", "scripted", "--served-model-name", "m", "--port", str(PORT), "-dp", "2"),
        *("--data-parallel-size-local", "1", "--data-parallel-hybrid-lb", *flags),
    )


def titles(host: Host) -> list[str]:
    return sorted(p.args for p in host.processes() if p.args.startswith("RAYWIRE::"))


def is_quiet(host: Host) -> bool:
    return not titles(host)


def is_ready(host: Host) -> bool:
    try:
        return httpx.get(url(host, "/ready"), timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def url(host: Host, path: str) -> str:
    return f"http://{host.address}:{PORT}{path}"


def test_each_host_serves_its_own_rank_until_the_job_is_stopped(cluster: RayCluster) -> None:
    """Two endpoints, each with the processes of a server of one rank; nothing is left of them."""
    job = submit(cluster)
    with cluster.head.network():
        for rank, host in enumerate(cluster.hosts):
            wait_for(partial(is_ready, host), f"{host.name}: {job.log}", 60, 0.3)
            answer = httpx.post(
                url(host, "/v1/completions"), json=completion_body(), timeout=20, trust_env=False
            )
            assert answer.status_code == 200
            assert titles(host) == [
                "RAYWIRE::APIServer_0",
                f"RAYWIRE::EngineCore_DP{rank}",
                f"RAYWIRE::Worker_DP{rank}_PP0_TP0",
            ]
            assert f"http://{host.address}:{PORT}" in job.log
    job.stop()
    assert job.status == "STOPPED"
    for host in cluster.hosts:
        wait_for(partial(is_quiet, host), f"nothing left on {host.name}", 20)
    assert cluster.living("actors") == []
    assert cluster.living("placement_groups") == []


def test_the_end_of_one_server_ends_all(cluster: RayCluster) -> None:
    """With one first cause, and exit code 1."""
    job = submit(cluster)
    with cluster.head.network():
        for host in cluster.hosts:
            wait_for(partial(is_ready, host), f"{host.name}: {job.log}", 60, 0.3)
    second = cluster.hosts[1]
    [pid] = [p.pid for p in second.processes() if p.args.startswith("RAYWIRE::Worker")]
    second.run("kill", "-9", str(pid))
    assert job.wait() == "FAILED"
    assert job.exit_code == 1
    assert "first cause: worker DP1_PP0_TP0" in job.log
    assert job.log.count("first cause:") == 1
    for host in cluster.hosts:
        wait_for(partial(is_quiet, host), f"nothing left on {host.name}", 20)
    assert cluster.living("placement_groups") == []


def test_settings_that_cannot_work_are_one_line(cluster: RayCluster) -> None:
    """Said by the server of a node, with the exit code of a mistake."""
    job = submit(cluster, "--max-model-len", "10M")
    assert job.wait() == "FAILED"
    assert job.exit_code == 2
    assert "--max-model-len" in job.log
