"""The RayJob that k8s/rayjob/cpu-demo declares, on hosts instead of pods: its very entrypoint,
environment, start parameters, ports, probes and hooks, with a real Ray cluster and the demo model.

What a kubelet and an operator would do is done here as they do it: `ray start` with each group's
parameters, and the entrypoint as a string over the job server's HTTP interface. Only paths of
volumes are folders of the test.
"""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster import environment
from cluster.kubernetes import names, probes
from cluster.model_source import resolve
from tests.helpers.server import ROOT, wait_for
from tests.integration.hosts import Host, hosts
from tests.integration.ray_cluster import ENVIRONMENT, Job, RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MANIFEST = yaml.safe_load((ROOT / "k8s" / "rayjob" / "cpu-demo" / "rayjob.yaml").read_text())
SPEC = MANIFEST["spec"]
CLUSTER = SPEC["rayClusterSpec"]
HEAD = CLUSTER["headGroupSpec"]
[WORKERS] = CLUSTER["workerGroupSpecs"]
KEY = "0123456789abcdef" * 4
METRICS_KEY = "fedcba9876543210" * 4


class Pods:
    """The hosts as the manifest's pods."""

    def __init__(self, machines: list[Host], folder: Path) -> None:
        self.head, self.worker = machines
        keys = folder / "keys"
        keys.mkdir()
        for name, key in ((names.API_KEYS, KEY), (names.METRICS_KEY, METRICS_KEY)):
            (keys / name).write_text(f"{key}\n")
            (keys / name).chmod(0o600)
        self._places = {
            names.KEYS_FOLDER: str(keys),
            names.CACHE_FOLDER: str(environment.read(os.environ).cache_dir),
        }
        self.cluster = RayCluster(machines, {**ENVIRONMENT, **self.variables(HEAD)})

    def here(self, text: str) -> str:
        """With the folders of the test where the pod has volumes."""
        for place, folder in self._places.items():
            text = text.replace(place, folder)
        return text

    def variables(self, group: dict[str, Any]) -> dict[str, str]:
        """The container's, but for those of Secrets that may be missing."""
        env = container(group)["env"]
        return {each["name"]: self.here(each["value"]) for each in env if "value" in each}

    def start(self) -> None:
        self._start(self.head, HEAD, "--head", f"--port={names.GCS_PORT}")
        self._start(self.worker, WORKERS, f"--address={self.cluster.address}")
        everybody = {self.head.address, self.worker.address}
        wait_for(lambda: set(self.cluster.alive_nodes()) == everybody, "all nodes are alive", 60)

    def _start(self, host: Host, group: dict[str, Any], *flags: str) -> None:
        """As the operator's command for the group."""
        params = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        host.run(
            "ray", "start", *flags, *params, f"--node-ip-address={host.address}",
            f"--metrics-export-port={names.METRICS_PORT}", "--disable-usage-stats",
            env={**ENVIRONMENT, **self.variables(group)}, timeout_s=120,
        )  # fmt: skip

    def submit(self) -> Job:
        """As the operator does in HTTPMode."""
        body = {
            "entrypoint": self.here(SPEC["entrypoint"]),
            "submission_id": "raywire-1",
            "runtime_env": yaml.safe_load(SPEC["runtimeEnvYAML"]),
        }
        headers = {"Authorization": f"Bearer {ENVIRONMENT['RAY_AUTH_TOKEN']}"}
        answer = httpx.post(
            f"{self.cluster.dashboard}/api/jobs/", json=body, headers=headers, timeout=60,
            trust_env=False,
        )  # fmt: skip
        answer.raise_for_status()
        return Job(self.cluster, "raywire-1")

    def asks(self, host: Host, command: list[str]) -> bool:
        """What the kubelet would learn."""
        env = {**ENVIRONMENT, **self.variables(HEAD)}
        return host.run(*command, env=env, timeout_s=30, check=False).returncode == 0


def container(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    resolve("demo", cache_dir=environment.read(os.environ).cache_dir)  # the cache that is mounted
    with hosts(2) as machines:
        pods = Pods(machines, tmp_path_factory.mktemp("pods"))
        with pods.head.network():
            pods.start()
            yield pods


def test_the_declared_job_serves_and_drains(pods: Pods) -> None:
    """From pods without a server, through loading and serving, to the end that the hook asks
    for."""
    head = container(HEAD)
    startup, readiness, liveness = (
        head[f"{name}Probe"]["exec"]["command"] for name in ("startup", "readiness", "liveness")
    )
    agent = f":{probes.AGENT_PORT}/"
    assert agent in startup[-1]
    wait_for(lambda: pods.asks(pods.head, startup), "Ray's agent is well", 60)
    assert pods.asks(pods.head, readiness)  # or the operator would never submit
    assert pods.asks(pods.worker, container(WORKERS)["readinessProbe"]["exec"]["command"])

    job = pods.submit()
    port = next(each["containerPort"] for each in head["ports"] if each["name"] == "http")
    url = f"http://{pods.head.address}:{port}"
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        job.wait_for_log(r"listening on")
        assert client.get("/live").status_code == 200
        assert not pods.asks(pods.head, readiness)  # it loads
        assert pods.asks(pods.head, liveness)
        job.wait_for_log(r"ready total=", 180)
        assert pods.asks(pods.head, readiness)

        body = {"model": "demo", "prompt": "The sea is", "max_tokens": 8, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 401
        metrics = {"Authorization": f"Bearer {METRICS_KEY}"}
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=metrics).status_code == 200
        client.headers["Authorization"] = f"Bearer {KEY}"
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 8
        assert KEY not in job.log

        declared = {each["containerPort"] for each in head["ports"]}
        listening = {each.port for each in pods.head.listening()}
        assert declared <= listening

        streamed = Stream(client, {**body, "max_tokens": 60, "ignore_eos": True, "stream": True})
        assert streamed.has_begun.wait(60)
        hook = head["lifecycle"]["preStop"]["exec"]["command"]
        env = {**ENVIRONMENT, **pods.variables(HEAD)}
        pods.head.run(*hook, env=env, timeout_s=90)
        streamed.thread.join(30)
    assert streamed.finish_reasons == ["length"]
    assert job.wait() == "FAILED"  # so the operator makes another
    assert pods.asks(pods.head, readiness)  # nothing listens, and Ray is well
    ours = [each.args for host in (pods.head, pods.worker) for each in host.processes()]
    assert [args for args in ours if args.startswith(("RAYWIRE::", "ray::EngineCore"))] == []


class Stream:
    """A streamed answer, read by a thread in the network of whoever makes it."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        self.has_begun = threading.Event()
        self.finish_reasons: list[str] = []
        response = client.send(
            client.build_request("POST", "/v1/completions", json=body), stream=True
        )
        self.thread = threading.Thread(target=self._read, args=(response,), daemon=True)
        self.thread.start()

    def _read(self, response: httpx.Response) -> None:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                self.has_begun.set()
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                if choice["finish_reason"]:
                    self.finish_reasons.append(choice["finish_reason"])
