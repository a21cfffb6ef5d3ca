"""Several hosts, one Ray cluster, one endpoint: the server as a job, seen from every host.

What the machine can show of a real cluster: own addresses, own processes, own shared memory, and
links that can be cut. One cluster serves all tests of this file; its start takes 15 to 30 s.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.server import wait_for
from tests.integration.hosts import hosts
from tests.integration.ray_cluster import RayCluster, ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with hosts(2) as machines:
        yield ray_cluster(machines)


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
    assert [look["host"] for look in looks] == ["host1", "host2"]
    assert [look["address"] for look in looks] == [one.address, two.address]
    assert [look["shm"] for look in looks] == [["probe-host1"], ["probe-host2"]]

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
