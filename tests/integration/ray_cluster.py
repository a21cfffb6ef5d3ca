"""A Ray cluster on the hosts of `hosts.py`, and jobs on it.

    with hosts(2) as machines:
        cluster = ray_cluster(machines)
        job = cluster.submit("serve", "scripted", "-dp", "2")
        job.wait_for_log("listening on")

The first host is the head, with the dashboard; the cluster ends with its hosts. What a user does
with `ray` is done with `ray` here; what a test only wants to know is asked of the dashboard itself,
since every call of the command costs seconds.
"""

import contextlib
import itertools
import json
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.server import wait_for
from tests.integration.hosts import Host, HostProcess

OURS = re.compile(r"RAYWIRE::|ray::(EngineCore|DPCoordinator)")
"""Titles of our processes."""

WORKER_PORTS = range(20000, 21000)
"""Where Ray's own listeners in drivers and actors are."""

ENVIRONMENT = {
    # Said aloud everywhere: `ray start --head` turns authentication on by itself where it finds a
    # token in the home folder, and the other nodes do not.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(24),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_prestart_worker_first_driver": "0",
    # A silent node is dead after 4 × (1 + 3) s: a link may be cut for 5 s, on busy cores too.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
}
"""Of every process of the cluster, and of its users."""

_GCS_PORT = 6379
_DASHBOARD_PORT = 8265
_START_TIMEOUT_S = 90.0
_FINAL = ("STOPPED", "SUCCEEDED", "FAILED")


class RayCluster:
    """A running cluster. Made by `ray_cluster`."""

    def __init__(self, machines: Sequence[Host], environment: Mapping[str, str]) -> None:
        self.hosts = machines
        self.head = machines[0]
        self.environment = environment
        self.address = f"{_bracketed(self.head.address)}:{_GCS_PORT}"
        self.dashboard = f"http://{_bracketed(self.head.address)}:{_DASHBOARD_PORT}"
        self._numbers = itertools.count(1)

    def ray(self, *arguments: str, timeout_s: float = 90.0, check: bool = True) -> str:
        """Run `ray` on the head, and return what it said."""
        env = {**self.environment, "RAY_API_SERVER_ADDRESS": self.dashboard}
        return self.head.run("ray", *arguments, env=env, timeout_s=timeout_s, check=check).stdout

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> "Job":
        """Submit `python -m cluster *arguments` from the checkout, and return the job at once."""
        job = Job(self, f"job{next(self._numbers)}")
        runtime_env = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60", **(env or {})}}
        flags = ["--submission-id", job.id, "--working-dir", ".", "--no-wait"]
        flags += ["--runtime-env-json", json.dumps(runtime_env)]
        self.ray("job", "submit", *flags, "--", "python", "-m", "cluster", *arguments)
        return job

    def get(self, path: str) -> Any:
        """Ask the dashboard, which is also the job server."""
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        with self.head.network():
            answer = httpx.get(self.dashboard + path, headers=headers, timeout=20, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def living(self, what: str) -> list[dict[str, Any]]:
        """The `actors` or `placement_groups` that have not ended, as Ray's state API has them."""
        rows = self.get(f"/api/v0/{what}?limit=1000&detail=true")["data"]["result"]["result"]
        return [row for row in rows if row["state"] not in ("DEAD", "REMOVED")]

    def alive_nodes(self) -> list[str]:
        """The addresses of the nodes that Ray believes alive."""
        rows = self.get("/api/v0/nodes?limit=100")["data"]["result"]["result"]
        return [row["node_ip"] for row in rows if row["state"] == "ALIVE"]


class Job:
    """A submitted job."""

    def __init__(self, cluster: RayCluster, submission_id: str) -> None:
        self.id = submission_id
        self._cluster = cluster

    @property
    def log(self) -> str:
        """What `ray job logs` shows."""
        return str(self._cluster.get(f"/api/jobs/{self.id}/logs")["logs"])

    @property
    def status(self) -> str:
        return str(self._cluster.get(f"/api/jobs/{self.id}")["status"])

    @property
    def exit_code(self) -> int:
        """The driver's own, once the job has ended."""
        return int(self._cluster.get(f"/api/jobs/{self.id}")["driver_exit_code"])

    def wait_for_log(self, pattern: str, timeout_s: float = 90.0) -> "re.Match[str]":
        """Wait until its log has `pattern`, as long as it runs."""

        def find() -> "re.Match[str] | None":
            has_ended = self.status in _FINAL  # asked first: the log may grow until then
            found = re.search(pattern, self.log, re.MULTILINE)
            if found is None and has_ended:
                raise AssertionError(f"{self.status} before {pattern!r}:\n{self.log}")
            return found

        try:
            match = wait_for(find, f"{pattern!r} in the log", timeout_s, interval_s=0.3)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None
        assert match is not None
        return match

    def wait(self, timeout_s: float = 60.0) -> str:
        """Wait for its end, and return how it ended."""
        wait_for(lambda: self.status in _FINAL, f"the end of {self.id}", timeout_s, 0.3)
        return self.status

    def stop(self) -> str:
        """`ray job stop`, which waits for the end; returns what it said."""
        return self._cluster.ray("job", "stop", self.id)


class ClusterServer:
    """A server that runs as a job on the head. Ask it in the head's `network()`."""

    def __init__(self, cluster: RayCluster, job: Job, port: int) -> None:
        self.cluster = cluster
        self.job = job
        self.port = port
        self.url = f"http://{_bracketed(cluster.head.address)}:{port}"

    def http(self) -> httpx.Client:
        """A client of this server; close it."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def processes(self, host: Host) -> list[HostProcess]:
        """Those of the formula, as the README counts them."""
        return [process for process in host.processes() if OURS.match(process.args)]


@contextlib.contextmanager
def serving(cluster: RayCluster, model: str, *flags: str, port: int) -> Iterator[ClusterServer]:
    """A server of `model` under the name `m`, ready; stopped with the block."""
    name_and_port = ("--served-model-name", "m", "--port", str(port))
    job = cluster.submit("serve", model, *name_and_port, *flags)
    try:
        job.wait_for_log(r"ready total=")
        yield ClusterServer(cluster, job, port)
    finally:
        if job.status not in _FINAL:
            job.stop()


def ray_cluster(
    machines: Sequence[Host], *, num_cpus: int = 4, environment: Mapping[str, str] | None = None
) -> RayCluster:
    """Start Ray on the hosts, and return when all nodes are there. It takes 15 to 30 s.

    Args:
        machines: the first becomes the head.
        num_cpus: what each node offers.
        environment: of all of Ray's processes, beside `ENVIRONMENT`.
    """
    cluster = RayCluster(machines, {**ENVIRONMENT, **(environment or {})})
    dashboard = (f"--dashboard-host={cluster.head.address}", f"--dashboard-port={_DASHBOARD_PORT}")
    _start_node(cluster, cluster.head, num_cpus, "--head", f"--port={_GCS_PORT}", *dashboard)
    with ThreadPoolExecutor() as threads:
        for started in [
            threads.submit(_start_node, cluster, host, num_cpus, f"--address={cluster.address}")
            for host in machines[1:]
        ]:
            started.result()
    everybody = {host.address for host in machines}
    wait_for(lambda: set(cluster.alive_nodes()) == everybody, "all nodes are alive", 30)
    return cluster


def _start_node(cluster: RayCluster, host: Host, num_cpus: int, *flags: str) -> None:
    host.run(
        "ray",
        "start",
        *flags,
        f"--node-ip-address={host.address}",
        f"--num-cpus={num_cpus}",
        f"--resources={json.dumps({host.name: 1})}",
        "--object-store-memory=80000000",  # nothing goes through it; the least that Ray takes
        f"--min-worker-port={WORKER_PORTS.start}",
        f"--max-worker-port={WORKER_PORTS.stop - 1}",
        "--disable-usage-stats",
        env=cluster.environment,
        timeout_s=_START_TIMEOUT_S,
    )


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class HostServer:
    """A server that runs on a host as a command, not as a job. Ask it in a `network()`."""

    def __init__(
        self, host: Host, process: "subprocess.Popen[bytes]", log: Path, port: int
    ) -> None:
        self.host = host
        self.process = process
        self.url = f"http://{_bracketed(host.address)}:{port}"
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def http(self) -> httpx.Client:
        """A client of this server; close it."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def wait_for_log(self, pattern: str, timeout_s: float = 90.0) -> None:
        """Wait until its log has `pattern`, as long as it runs."""

        def is_there() -> bool:
            has_ended = self.process.poll() is not None
            found = re.search(pattern, self.log) is not None
            assert found or not has_ended, f"ended before {pattern!r}:\n{self.log}"
            return found

        try:
            wait_for(is_there, f"{pattern!r} in the log", timeout_s, interval_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None


@contextlib.contextmanager
def serving_on(
    host: Host, folder: Path, *flags: str, port: int, env: Mapping[str, str] | None = None
) -> Iterator[HostServer]:
    """`raywire serve flags` on a host, ready; killed with the block, if it still runs.

    Args:
        host: where it runs.
        folder: where its log goes.
        flags: model and flags.
        port: of its endpoint.
        env: of the command.
    """
    log = folder / f"server-{port}.log"
    command = ("python", "-m", "cluster", "serve", *flags, "--port", str(port))
    process = host.popen(*command, env={**ENVIRONMENT, **(env or {})}, log=log)
    server = HostServer(host, process, log, port)
    try:
        server.wait_for_log("ready total=")
        yield server
    finally:
        process.terminate()
        process.wait(30)
