"""`raywire render k8s`: numbers that follow from the plan, documents that a cluster takes, and the
files in k8s/ as it makes them."""

import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from cluster import environment
from cluster.cli import cli
from cluster.kubernetes import names
from cluster.kubernetes.lint.run import check
from cluster.kubernetes.lint.workload import amount
from cluster.kubernetes.sizing import RAY_HEAD_VCPUS
from cluster.kubernetes.stop_times import PRE_STOP_S
from cluster.model_source import resolve
from cluster.plan import Topology
from tests.helpers.kube_schema import problems

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.parent.relative_to(K8S) for path in K8S.glob("ray*/*/kustomization.yaml"))
KUBECTL = Path(sysconfig.get_path("scripts")) / "kubectl"
GPU = "Qwen/Qwen3-8B --gpu -dp 4 -tp 2 --data-parallel-size-local 2"

Document = dict[str, Any]


@pytest.fixture(scope="module")
def demo() -> None:
    """The demo model is in the cache: its memory is computed from its files."""
    resolve("demo", cache_dir=environment.read(os.environ).cache_dir)


def run(line: str) -> str:
    result = CliRunner().invoke(cli, ["render", "k8s", *shlex.split(line)])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.stdout


def documents(text: str) -> list[Document]:
    return [each for each in yaml.safe_load_all(text) if each is not None]


def custom(text: str) -> Document:
    [found] = [each for each in documents(text) if each["kind"] in ("RayJob", "RayCluster")]
    return found


def pods(document: Document) -> tuple[Document, Document, Document]:
    """Head and worker pod, and the worker group."""
    spec = document["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    [group] = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"], group


def commands() -> list[str]:
    """What k8s/render.sh runs, for each kind."""
    script = (K8S / "render.sh").read_text().replace("\\\n", " ")
    [ray] = re.findall(r"^ray=(\S+)", script, re.MULTILINE)
    script = script.replace("$ray", ray)
    lines = re.findall(r"^\s*raywire render k8s (.*)$", script, re.MULTILINE)
    assert len(lines) == 2
    return [line.replace("$kind", kind) for kind in ("rayjob", "raycluster") for line in lines]


@pytest.mark.usefixtures("demo")
def test_the_committed_files_are_what_render_makes(tmp_path: Path) -> None:
    """Nobody has edited them by hand, and none is left over."""
    for line in commands():
        run(line.replace("-o k8s", f"-o {tmp_path}"))
    made = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*.yaml")}
    kept = {path.relative_to(K8S): path for path in K8S.rglob("*.yaml")}

    assert made.keys() == kept.keys()
    for name, path in made.items():
        assert path.read_text() == kept[name].read_text(), name


def test_a_tree_says_how_it_is_applied(tmp_path: Path) -> None:
    words = ["render", "k8s", "some/model", "--gpu", "-o", str(tmp_path), "--overlay", "ours"]
    result = CliRunner().invoke(cli, words)

    assert f"`kubectl apply -k {tmp_path / 'rayjob' / 'ours'}` applies it" in result.stderr
    assert kustomize(tmp_path / "rayjob" / "ours")


@pytest.mark.parametrize("overlay", OVERLAYS, ids=str)
def test_each_overlay_builds_and_a_cluster_would_take_it(overlay: Path) -> None:
    """By a real `kubectl kustomize`, against the real definitions, strictly."""
    built = kustomize(K8S / overlay)

    assert [f"{each['kind']}: {problem}" for each in built for problem in problems(each)] == []
    assert {each["kind"] for each in built} >= {
        "Service",
        "ServiceAccount",
        "NetworkPolicy",
        "PodDisruptionBudget",
    }


@pytest.mark.usefixtures("demo")
def test_a_bundle_holds_what_the_overlay_builds() -> None:
    for line in commands():
        kind, overlay = re.findall(r"--kind (\S+).*--overlay (\S+)", line)[0]
        bundle = documents(run(re.sub(r"-o \S+ --overlay \S+", "", line)))

        assert by_kind(bundle) == by_kind(kustomize(K8S / kind / overlay))


@pytest.mark.parametrize("component", ["monitoring", "kueue"])
def test_an_overlay_can_take_up_a_component(component: str, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", str(K8S), str(tmp_path)], check=True)
    folder = tmp_path / "k8s" / "rayjob" / "gpu"
    with (folder / "kustomization.yaml").open("a") as file:
        file.write(f"components:\n- ../../components/{component}\n")
    built = by_kind(kustomize(folder))

    assert [problem for each in built.values() for problem in problems(each)] == []
    if component == "monitoring":
        assert "PodMonitor" in built
    else:
        assert "kueue.x-k8s.io/queue-name" in built["RayJob"]["metadata"]["labels"]


def kustomize(folder: Path) -> list[Document]:
    done = subprocess.run(
        [KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=60, check=True
    )
    return documents(done.stdout)


def by_kind(found: list[Document]) -> dict[str, Document]:
    return {each["kind"]: each for each in found}


# ----------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("flags", "topology", "ranks_per_pod"),
    [
        ("", Topology(), 1),
        ("-dp 4 -tp 2", Topology(data_parallel_size=4, tensor_parallel_size=2), 1),
        (
            "-dp 4 -tp 2 --data-parallel-size-local 2",
            Topology(data_parallel_size=4, tensor_parallel_size=2),
            2,
        ),
        (
            "-dp 2 -pp 2 --api-server-count 1",
            Topology(data_parallel_size=2, pipeline_parallel_size=2, api_server_count=1),
            1,
        ),
    ],
)
def test_cores_and_devices_follow_from_the_formula(
    flags: str, topology: Topology, ranks_per_pod: int
) -> None:
    head, worker, group = pods(custom(run(f"some/model --gpu {flags}")))
    asked = [requests(pod) for pod in (head, worker)]
    num_pods = group["replicas"]

    assert num_pods == topology.num_engines // ranks_per_pod
    assert group["minReplicas"] == group["maxReplicas"] == num_pods
    vcpus = int(asked[0]["cpu"]) + num_pods * int(asked[1]["cpu"])
    assert vcpus == topology.min_vcpus + RAY_HEAD_VCPUS
    assert int(asked[1]["nvidia.com/gpu"]) * num_pods == topology.num_workers
    assert "nvidia.com/gpu" not in asked[0]


@pytest.mark.usefixtures("demo")
def test_memory_grows_with_model_and_cache() -> None:
    """By what they take, and with each engine of the pod."""
    small = memory(pods(custom(run(f"demo {cache('256M')}")))[1])
    large = memory(pods(custom(run(f"demo {cache('1280M')}")))[1])
    two = memory(pods(custom(run(f"demo -dp 2 --data-parallel-size-local 2 {cache('256M')}")))[1])

    assert large - small == 1024
    assert two - small > 1024 + 512 + 256  # a worker, its weights, its cache


def cache(size: str) -> str:
    return f"--max-model-len 8192 --kv-cache-memory-bytes {size}"


def test_shared_memory_holds_object_store_and_rings() -> None:
    """And counts as memory."""
    chunks = {tp: 10 + 4 * tp for tp in (1, 2)}
    for tp, num_chunks in chunks.items():
        worker = pods(custom(run(f"some/model --gpu -tp {tp}")))[1]
        [shm] = [each["emptyDir"] for each in worker["volumes"] if each["name"] == "shm"]
        size = int(shm["sizeLimit"].removesuffix("Mi"))

        assert shm["medium"] == "Memory"
        assert size >= 100 + num_chunks * 16
        assert memory(worker) > size


def test_time_to_end_covers_the_drain() -> None:
    """The pod waits for Ray, Ray for the server, workers for the head. The drain begins when the
    endpoint has been taken out."""
    document = custom(run("some/model --gpu --shutdown-timeout 120"))
    head, worker, _ = pods(document)
    job_stop_s = int(
        yaml.safe_load(document["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]
    )

    assert 120 < job_stop_s < head["terminationGracePeriodSeconds"]
    assert head["terminationGracePeriodSeconds"] < worker["terminationGracePeriodSeconds"]
    [container] = head["containers"]
    hook = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert hook == f"sleep {PRE_STOP_S}; raywire drain --port 8000 --timeout {job_stop_s}"


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
def test_a_server_is_what_its_flags_say(kind: str) -> None:
    """Keys come from a file; the Service, the probes and the policy have its port."""
    text = run(f"{GPU} --kind {kind} --port 9000 --max-model-len 8192 --name mine")
    document = custom(text)
    entrypoint = document["spec"].get(
        "entrypoint", document["metadata"].get("annotations", {}).get(names.ENTRYPOINT_ANNOTATION)
    )
    words = shlex.split(entrypoint)

    start = words.index("raywire")
    assert words[start : start + 3] == ["raywire", "serve", "Qwen/Qwen3-8B"]
    if kind == "rayjob":  # however it ends, it has failed, and is tried again
        assert words[-3:] == [";", "exit", "1"]
    else:
        assert words[0] == "exec"
    assert words[words.index("--metrics-key-file") + 1] == "/etc/raywire/keys/metrics-key"
    assert words[words.index("--api-key-file") + 1] == "/etc/raywire/keys/api-keys"
    assert words[words.index("--port") + 1] == "9000"
    assert words[words.index("--max-model-len") + 1] == "8192"
    found = by_kind(documents(text))
    assert found["Service"]["spec"]["ports"][0]["port"] == 9000
    assert {"port": 9000, "protocol": "TCP"} in ports_that_come_in(found["NetworkPolicy"])
    assert "127.0.0.1:9000/ready" in yaml.dump(pods(document)[0], width=1000)
    assert document["metadata"]["name"] == "mine"


def test_versions_are_those_that_are_installed() -> None:
    """Unless the image has others. Head and workers have one image."""
    document = custom(run(f"{GPU} --image registry.example/raywire:7"))
    spec = document["spec"]["rayClusterSpec"]
    other = custom(run(f"{GPU} --ray-version 2.61.0"))
    assert other["spec"]["rayClusterSpec"]["rayVersion"] == "2.61.0"

    assert spec["rayVersion"] == names.ray_version()
    assert {pod["containers"][0]["image"] for pod in pods(document)[:2]} == {
        "registry.example/raywire:7"
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("some/model", "not on this machine"),
        ("some/model --gpu --api-key secret", "would stand in the manifest"),
        ("some/model --gpu -dp 3 --data-parallel-size-local 2", "divide"),
        ("some/model --gpu --accept cpu", "a rule and a reason"),
        ("some/model --gpu --accept cpus:small", "no rule is called 'cpus'; there are accepted,"),
        ("some/model --gpu --name My_Server", "--name takes at most 47 small letters"),
        (f"some/model --gpu --name {'r' * 48}", "--name takes at most 47"),
        ("some/model --gpu -o x --overlay ../y", "--overlay takes"),
        ("some/model --gpu --queue 'team a'", "--queue takes the name of a LocalQueue"),
        ("some/model --gpu --image ''", "--image takes an image"),
        ("some/model --gpu --ray-version new", "--ray-version takes a version like"),
        ("some/model --gpu --ray-version 2.54.0", "Ray 2.54.0 is too old"),
        ("some/model --gpu --port 0", "anybody's choice"),
        ("some/model --gpu --port 8265", "--port 8265 is Ray's in a pod"),
        ("some/model --gpu --device cpu", "--device cpu and --gpu contradict each other"),
        ("demo --device cuda", "--device cuda and no --gpu contradict each other"),
        ("some/model --gpu --host 127.0.0.1", "--host is not for pods"),
        ("some/model --gpu --data-parallel-backend mp", "--data-parallel-backend is not for pods"),
        ("some/model --gpu --ray-address 10.0.0.1:6379", "--ray-address is not for pods"),
        ("some/model --gpu -dp 2 --data-parallel-rank 0", "--data-parallel-rank is not for pods"),
        ("~/model --gpu", "MODEL ~/model names a file of this machine"),
        ("some/model --gpu --generation-config .", "--generation-config names a file of this"),
        ("some/model --gpu -o /proc/raywire", "cannot write /proc/raywire/base"),
        ("demo", "the KV cache has no size: give --kv-cache-memory-bytes"),
        ("some/model --gpu --overlay y", "a folder of a tree, which --output is for"),
        ("demo --kv-cache-memory-bytes 16M", "KV cache"),
        ("some/model --gpu --admin-key-file pyproject.toml", "names a file of this machine"),
        ("some/model --gpu --ssl-certfile pyproject.toml", "names a file of this machine"),
    ],
)
@pytest.mark.usefixtures("demo")
def test_what_cannot_be_rendered_is_said_in_one_line(line: str, message: str) -> None:
    result = CliRunner().invoke(cli, ["render", "k8s", *shlex.split(line)])

    assert result.exit_code != 0
    assert message in str(result.exception) + result.output


def test_a_server_may_speak_https_itself() -> None:
    """With a certificate of a Secret; probes ask it so, and gateways learn it from the Service."""
    text = run(f"{GPU} --tls")
    document = custom(text)
    head, worker, _ = pods(document)
    [secret] = [each["secret"] for each in head["volumes"] if each["name"] == "tls"]
    [container] = head["containers"]
    place = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}["tls"]
    words = shlex.split(document["spec"]["entrypoint"])

    assert secret["secretName"] == names.TLS_SECRET
    files = {f"{place}/{each['path']}" for each in secret["items"]}
    assert files == {words[words.index(f"--ssl-{name}file") + 1] for name in ("cert", "key")}
    for name, path in (("readiness", "ready"), ("liveness", "live")):
        command = container[f"{name}Probe"]["exec"]["command"][-1]
        assert f"https://127.0.0.1:8000/{path}" in command
    assert "tls" not in yaml.dump(worker)
    assert by_kind(documents(text))["Service"]["spec"]["ports"][0]["appProtocol"] == "https"
    assert check(documents(text)) == []
    assert [problem for each in documents(text) for problem in problems(each)] == []


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
def test_a_queue_is_a_label(kind: str) -> None:
    """Kueue suspends and resumes; a manifest that said either would undo it with each apply."""
    text = run(f"{GPU} --kind {kind} --queue team-a")
    document = custom(text)

    assert document["metadata"]["labels"][names.QUEUE_LABEL] == "team-a"
    assert "suspend" not in document["spec"]
    assert check(documents(text)) == []


def test_monitors_and_secrets_name_what_is_there(tmp_path: Path) -> None:
    """Ports of our pods, keys of the Secret; the template holds no key."""
    run(f"{GPU} -o {tmp_path} --tls")
    secret, monitor, job = (
        yaml.safe_load((tmp_path / name).read_text())
        for name in (
            "base/secret-template.yaml",
            "components/monitoring/pod-monitor.yaml",
            "rayjob/raywire/rayjob.yaml",
        )
    )
    ray, server = monitor["spec"]["podMetricsEndpoints"]
    named = {each["name"] for each in pods(job)[0]["containers"][0]["ports"]}

    assert problems(secret) == []
    assert set(secret["stringData"].values()) == {""}
    assert secret["metadata"]["name"] == server["bearerTokenSecret"]["name"] == names.KEYS_SECRET
    assert server["bearerTokenSecret"]["key"] in secret["stringData"]
    assert {names.API_KEYS, names.METRICS_KEY, names.HUB_TOKEN} == secret["stringData"].keys()
    assert {ray["port"], server["port"]} <= named
    assert server["scheme"] == "https"


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
def test_the_demo_fits_a_laptop_and_says_that_it_asks_for_less(kind: str) -> None:
    """4 vCPUs and 8 GiB, of which the system needs some."""
    document = custom((K8S / kind / "cpu-demo" / f"{kind}.yaml").read_text())
    head, worker, group = pods(document)
    assert group["replicas"] == 1
    vcpus = sum(amount(requests(pod)["cpu"]) or 0 for pod in (head, worker))

    assert vcpus <= 3.5
    assert memory(head) + memory(worker) <= 7 * 1024
    assert vcpus < Topology().min_vcpus + RAY_HEAD_VCPUS
    assert document["metadata"]["annotations"][names.ACCEPTED_ANNOTATION].startswith("cpu: ")


def test_only_a_head_that_is_ready_gets_requests() -> None:
    """Its workers find it all the time."""
    text = run(GPU)
    head = custom(text)["spec"]["rayClusterSpec"]["headGroupSpec"]
    service = by_kind(documents(text))["Service"]["spec"]

    assert head["headService"]["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in service
    assert service["selector"] == head["template"]["metadata"]["labels"]


def ports_that_come_in(policy: Document) -> list[Document]:
    return [port for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())]


def requests(pod: Document) -> dict[str, str]:
    [container] = pod["containers"]
    return container["resources"]["requests"]  # type: ignore[no-any-return]


def memory(pod: Document) -> int:
    """MiB."""
    return int(requests(pod)["memory"].removesuffix("Mi"))
