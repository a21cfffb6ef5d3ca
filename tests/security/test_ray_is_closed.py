"""What strangers get of a server on a Ray cluster, and what its dashboard's readers learn."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.streams import completion_body
from tests.integration.hosts import Host, hosts
from tests.integration.ray_cluster import RayCluster, ray_cluster, serving_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECRETS = {
    "HF_TOKEN": "hf_secret-5d0c1",
    "RAYWIRE_API_KEY": "sk-secret-5d0c2",
    "RAYWIRE_ADMIN_KEY": "sk-secret-5d0c3",
}
IN_FILE = "sk-secret-5d0c4"

ACCOUNTS = (
    "/api/jobs/",
    "/api/v0/actors?detail=true&limit=1000",
    "/api/v0/jobs?detail=true&limit=1000",
    "/api/v0/nodes?detail=true&limit=1000",
    "/api/v0/placement_groups?detail=true&limit=1000",
    "/api/v0/runtime_envs?detail=true&limit=1000",
    "/api/v0/tasks?detail=true&limit=1000",
    "/api/v0/workers?detail=true&limit=1000",
    "/logical/actors",
    "/nodes?view=summary",
)
"""What the dashboard shows and the state API tells."""


@pytest.fixture
def machines() -> Iterator[list[Host]]:
    with hosts(2) as found:
        yield found


def listening_ports(host: Host) -> set[int]:
    """All TCP ports of a host that somebody listens on, on whichever address."""
    lines = host.run("ss", "-Hltn").stdout.splitlines()
    return {int(line.split()[3].rpartition(":")[2]) for line in lines}


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


@pytest.mark.row("S-04", "S-38")
def test_nothing_but_http_answers_another_host(machines: list[Host], tmp_path: Path) -> None:
    """Of a server on a cluster of its own: of twenty listening ports one, on all addresses of the
    host."""
    one, two = machines
    flags = ("scripted", "-dp", "2", "--data-parallel-backend", "ray", "--served-model-name", "m")
    with serving_on(one, tmp_path, *flags, port=8001, env={"RAY_ADDRESS": "local"}) as server:
        ports = listening_ports(one)
        assert len(ports) > 5
        with two.network():
            for address in (one.address4, one.address6):
                open_ports = {port for port in ports if answers(address, port)}
                assert open_ports == ({8001} if address == one.address4 else set())
            with server.http() as client:
                assert client.post("/v1/completions", json=completion_body()).status_code == 200


@pytest.mark.row("S-08", "S-38", "S-39")
def test_a_cluster_with_a_token_tells_nobody_and_its_readers_no_secret(
    machines: list[Host], tmp_path: Path
) -> None:
    """Ray's job server wants the token on every address and method, also of a browser on the same
    machine. Who has it sees actors, tasks and jobs, and in none of them a secret of the command's
    environment or files; nor is one in a log or a process's arguments."""
    one = machines[0]
    cluster = ray_cluster(machines)
    key_file = tmp_path / "keys"
    key_file.write_text(f"{IN_FILE}\n")
    key_file.chmod(0o600)
    flags = ("scripted", "-dp", "2", "--data-parallel-size-local", "1", "--served-model-name", "m")
    given = ("--api-key-file", str(key_file), "--ray-address", cluster.address)
    env = {**cluster.environment, **SECRETS}
    with one.network(), serving_on(one, tmp_path, *flags, *given, port=8002, env=env) as server:
        with server.http() as client:
            headers = {"Authorization": f"Bearer {IN_FILE}"}
            answer = client.post("/v1/completions", json=completion_body(), headers=headers)
            assert answer.status_code == 200
        assert_strangers_are_refused(cluster)
        shown = {path: read(cluster, path) for path in ACCOUNTS}
        assert "EngineCore_DP1" in shown["/logical/actors"]
        shown |= {f"processes of {host.name}": arguments(host) for host in machines}
        shown |= {f"files of {host.name}": texts(host) for host in machines}
        shown["log"] = server.log
    secrets = [*SECRETS.values(), IN_FILE]
    found = [
        (where, secret) for where, text in shown.items() for secret in secrets if secret in text
    ]
    assert found == []


def assert_strangers_are_refused(cluster: RayCluster) -> None:
    browser = {"User-Agent": "Mozilla/5.0", "Origin": "http://evil.example", "Host": "evil.example"}
    wrong = {"Authorization": f"Bearer {'0' * 48}"}
    with httpx.Client(base_url=cluster.dashboard, trust_env=False, timeout=20) as client:
        for headers in ({}, browser, wrong):
            for method, path in (
                ("GET", "/api/jobs/"),
                ("POST", "/api/jobs/"),
                ("DELETE", "/api/jobs/job1"),
                ("PUT", "/api/serve/applications/"),
                ("DELETE", "/api/serve/applications/"),
                ("GET", "/api/v0/actors"),
                ("GET", "/logical/actors"),
            ):
                answer = client.request(method, path, headers=headers, json={"entrypoint": "id"})
                assert answer.status_code in (401, 403), (method, path, answer.text)


def read(cluster: RayCluster, path: str) -> str:
    headers = {"Authorization": f"Bearer {cluster.environment['RAY_AUTH_TOKEN']}"}
    with httpx.Client(base_url=cluster.dashboard, trust_env=False, timeout=30) as client:
        answer = client.get(path, headers=headers)
    assert answer.status_code == 200, (path, answer.text)
    return answer.text


def arguments(host: Host) -> str:
    return "\n".join(process.args for process in host.processes())


def texts(host: Host) -> str:
    """What lies in its temporary folder, where Ray has its logs and sessions."""
    return host.run("sh", "-c", 'find "$TMPDIR" -type f -exec cat {} +').stdout
