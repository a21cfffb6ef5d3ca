"""`raywire lint k8s`: what we commit passes; each mistake is found, by one manifest for each."""

import copy
import io
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.cli import cli
from cluster.kubernetes import names
from cluster.kubernetes.lint.run import RULES, check
from cluster.kubernetes.lint.workload import amount

K8S = Path(__file__).parents[2] / "k8s"
Document = dict[str, Any]
Break = Callable[[Document, list[Document]], None]


def load(kind: str, overlay: str) -> list[Document]:
    """The documents of an overlay, its own first; to be changed at will."""
    return copy.deepcopy(_load(kind, overlay))


@lru_cache
def _load(kind: str, overlay: str) -> list[Document]:
    own = yaml.safe_load((K8S / kind / overlay / f"{kind}.yaml").read_text())
    listed = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())["resources"]
    return [own, *(yaml.safe_load((K8S / "base" / name).read_text()) for name in listed)]


def rules(documents: list[Document]) -> set[str]:
    return {finding.rule for finding in check(documents) if finding.accepted is None}


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
@pytest.mark.parametrize("overlay", ["gpu", "cpu-demo"])
def test_what_is_committed_has_no_finding(kind: str, overlay: str) -> None:
    """But for the one that a demo for a laptop accepts, and is told of."""
    findings = check(load(kind, overlay))

    assert [str(each) for each in findings if each.accepted is None] == []
    assert {each.rule for each in findings} == ({"cpu"} if overlay == "cpu-demo" else set())


# --------------------------------------------------------------------------------------- mistakes


def cluster(job: Document) -> Document:
    return job["spec"]["rayClusterSpec"]  # type: ignore[no-any-return]


def old_without_token(ray: Document) -> None:
    ray.update(rayVersion="2.9.0")
    del ray["authOptions"]


def pod(job: Document, *, of_worker: bool = False) -> Document:
    group = cluster(job)["workerGroupSpecs"][0] if of_worker else cluster(job)["headGroupSpec"]
    return group["template"]["spec"]  # type: ignore[no-any-return]


def container(job: Document, *, of_worker: bool = False) -> Document:
    return pod(job, of_worker=of_worker)["containers"][0]  # type: ignore[no-any-return]


def beside(job: Document, kind: str = "containers", **spec: Any) -> None:
    """Another container of the worker pods."""
    pod(job, of_worker=True).setdefault(kind, []).append({"name": "other", **spec})


def resources(job: Document, kind: str, **given: str) -> None:
    container(job, of_worker=True)["resources"][kind] |= given


def asking(job: Document, words: str) -> None:
    job["spec"]["entrypoint"] += f" {words}"


def annotate(job: Document, name: str, value: str) -> None:
    job["metadata"].setdefault("annotations", {})[name] = value


def queued(job: Document, **spec: Any) -> None:
    job["metadata"]["labels"][names.QUEUE_LABEL] = "raywire"
    job["spec"] |= spec


def queued_in_groups(job: Document, num_groups: int) -> None:
    queued(job)
    cluster(job)["workerGroupSpecs"] *= num_groups


def submit_from_a_sidecar(job: Document) -> None:
    job["spec"].update(submissionMode="SidecarMode", submitterConfig={"backoffLimit": 0})
    pod(job)["restartPolicy"] = "Never"


def remember(job: Document, **options: str) -> None:
    """The GCS, beyond the head."""
    cluster(job)["gcsFaultToleranceOptions"] = {"redisAddress": "redis:6379", **options}


def remember_twice(job: Document) -> None:
    remember(job)
    annotate(job, "ray.io/ft-enabled", "true")


def let_in(documents: list[Document], **rule: Any) -> None:
    of(documents, "NetworkPolicy")["spec"]["ingress"].append(rule)


def let_in_by(documents: list[Document], **requirement: Any) -> None:
    """Pods of all namespaces."""
    pods = {"matchExpressions": [requirement]}
    let_in(documents, **{"from": [{"namespaceSelector": {}, "podSelector": pods}]})


def choose(documents: list[Document], **requirement: Any) -> None:
    """Let the policy be for these pods."""
    selector = {"matchExpressions": [requirement]}
    of(documents, "NetworkPolicy")["spec"]["podSelector"] = selector


def service(documents: list[Document], **spec: Any) -> None:
    of(documents, "Service")["spec"] |= spec


def http_probe(path: str) -> Document:
    return {"httpGet": {"path": path, "port": 8000}}


MISTAKES: list[tuple[str, str, Break]] = [
    ("cpu", "less than the formula", lambda job, _: resources(job, "requests", cpu="4")),
    ("cpu", "more ranks than cores", lambda job, _: asking(job, "-dp 8")),
    ("gpu", "too few", lambda job, _: resources(job, "limits", **{"nvidia.com/gpu": "2"})),
    (
        "gpu",
        "on the head",
        lambda job, _: container(job)["resources"]["limits"].update({"nvidia.com/gpu": "1"}),
    ),
    (
        "shm",
        "64 MiB",
        lambda job, _: pod(job, of_worker=True)["volumes"][0]["emptyDir"].update(sizeLimit="64Mi"),
    ),
    (
        "shm-memory",
        "nearly all of the memory",
        lambda job, _: pod(job)["volumes"][0]["emptyDir"].update(sizeLimit="3Gi"),
    ),
    ("memory", "no limit", lambda job, _: container(job)["resources"]["limits"].pop("memory")),
    ("memory", "a smaller request", lambda job, _: resources(job, "requests", memory="1Gi")),
    ("cpu-limit", "below the request", lambda job, _: resources(job, "limits", cpu="13")),
    (
        "head-as-worker",
        "with CPUs",
        lambda job, _: cluster(job)["headGroupSpec"]["rayStartParams"].pop("num-cpus"),
    ),
    ("fixed-size", "autoscaling", lambda job, _: cluster(job).update(enableInTreeAutoscaling=True)),
    (
        "fixed-size",
        "a range",
        lambda job, _: cluster(job)["workerGroupSpecs"][0].update(maxReplicas=9),
    ),
    ("grace", "a long drain", lambda job, _: asking(job, "--shutdown-timeout 600")),
    (
        "grace",
        "workers first",
        lambda job, _: pod(job, of_worker=True).update(terminationGracePeriodSeconds=40),
    ),
    ("job-stop", "not given", lambda job, _: job["spec"].pop("runtimeEnvYAML")),
    ("drain", "no hook", lambda job, _: container(job).pop("lifecycle")),
    ("driver-place", "CPUs of its own", lambda job, _: job["spec"].update(entrypointNumCpus=1)),
    (
        "drain",
        "workers that do not wait",
        lambda job, _: container(job, of_worker=True).pop("lifecycle"),
    ),
    ("port", "another", lambda job, _: asking(job, "--port 9000")),
    ("probes", "none", lambda job, _: container(job).pop("livenessProbe")),
    (
        "probes",
        "Ray's alone",
        lambda job, _: container(job).update(
            readinessProbe={"exec": {"command": ["ray", "health-check"]}}
        ),
    ),
    (
        "probe-deadlock",
        "the server's",
        lambda job, _: container(job).update(readinessProbe=http_probe("/ready")),
    ),
    (
        "probe-deadlock",
        "the port by its name",
        lambda job, _: container(job).update(startupProbe={"tcpSocket": {"port": "http"}}),
    ),
    (
        "liveness",
        "while it loads",
        lambda job, _: container(job).update(livenessProbe=http_probe("/health")),
    ),
    ("head-service", "not ready", lambda job, _: cluster(job)["headGroupSpec"].pop("headService")),
    ("versions", "two images", lambda job, _: container(job).update(image="raywire:0.0.9")),
    (
        "versions",
        "another Ray than it says",
        lambda job, _: container(job).update(image="rayproject/ray:2.40.0-py311"),
    ),
    ("pinned", "latest", lambda job, _: container(job).update(image="raywire:latest")),
    ("pinned", "no tag", lambda job, _: container(job).update(image="registry:5000/raywire")),
    ("ray-version", "none", lambda job, _: cluster(job).pop("rayVersion")),
    ("ray-version", "before tokens", lambda job, _: cluster(job).update(rayVersion="2.51.1")),
    ("ray-version", "without tokens", lambda job, _: old_without_token(cluster(job))),
    ("ray-version", "too old for raywire", lambda job, _: cluster(job).update(rayVersion="2.54.0")),
    ("ray-version", "no number", lambda job, _: cluster(job).update(rayVersion="nightly")),
    (
        "start-params",
        "twice",
        lambda job, _: cluster(job)["headGroupSpec"].update(resources={"CPU": "0"}),
    ),
    (
        "start-params",
        "labels",
        lambda job, _: cluster(job)["headGroupSpec"]["rayStartParams"].update(labels="a=b"),
    ),
    (
        "fault-tolerance",
        "an address as a variable",
        lambda job, _: container(job)["env"].append(
            {"name": "RAY_REDIS_ADDRESS", "value": "r:6379"}
        ),
    ),
    (
        "fault-tolerance",
        "a password as a parameter",
        lambda job, _: cluster(job)["headGroupSpec"]["rayStartParams"].update(
            {"redis-password": "x"}
        ),
    ),
    (
        "fault-tolerance",
        "twice",
        lambda job, _: remember_twice(job),
    ),
    ("alpha", "a field", lambda job, _: cluster(job).update(tlsOptions={"enabled": True})),
    ("alpha", "a back end", lambda job, _: remember(job, backend="rocksdb")),
    ("queue", "suspended by us", lambda job, _: queued(job, suspend=True)),
    ("queue", "never shut down", lambda job, _: queued(job, shutdownAfterJobFinishes=False)),
    ("queue", "a cluster that is there", lambda job, _: queued(job, clusterSelector={"a": "b"})),
    (
        "queue",
        "many groups",
        lambda job, _: queued_in_groups(job, 8),
    ),
    (
        "job",
        "retries that nobody waits for",
        lambda job, _: job["spec"].update(submissionMode="InteractiveMode"),
    ),
    ("job", "a time to live alone", lambda job, _: job["spec"].pop("shutdownAfterJobFinishes")),
    ("job", "a selector", lambda job, _: job["spec"].update(clusterSelector={"a": "b"})),
    ("job", "a sidecar", lambda job, _: job["spec"].update(submissionMode="SidecarMode")),
    (
        "job",
        "a sidecar with a submitter",
        lambda job, _: submit_from_a_sidecar(job),
    ),
    ("comes-back", "never", lambda job, _: job["spec"].pop("backoffLimit")),
    ("comes-back", "a deadline", lambda job, _: job["spec"].update(activeDeadlineSeconds=3600)),
    ("submitter", "by default", lambda job, _: job["spec"].pop("submissionMode")),
    ("reaper", "none", lambda job, _: pod(job).pop("shareProcessNamespace")),
    ("secrets", "a key", lambda job, _: asking(job, "--api-key=abc")),
    ("secrets", "a token", lambda job, _: asking(job, "--x hf_" + "a" * 24)),
    (
        "secrets",
        "in the job's variables",
        lambda job, _: job["spec"].update(runtimeEnvYAML="env_vars: {HF_TOKEN: abc}"),
    ),
    (
        "secrets",
        "in a pod's variables",
        lambda job, _: container(job)["env"].append({"name": "MY_API_KEY", "value": "abc"}),
    ),
    (
        "secrets",
        "beside Ray",
        lambda job, _: beside(job, env=[{"name": "MY_API_KEY", "value": "abc"}]),
    ),
    (
        "secrets",
        "before Ray",
        lambda job, _: beside(job, "initContainers", env=[{"name": "PASSWORD", "value": "abc"}]),
    ),
    ("dashboard", "without a token", lambda job, _: cluster(job).pop("authOptions")),
    (
        "dashboard",
        "for the world",
        lambda job, _: cluster(job)["headGroupSpec"].update(serviceType="LoadBalancer"),
    ),
    (
        "dashboard",
        "by an ingress",
        lambda job, _: cluster(job)["headGroupSpec"].update(enableIngress=True),
    ),
    (
        "dashboard",
        "by a Service of ours",
        lambda _, rest: service(
            rest, type="NodePort", ports=[{"port": 80, "targetPort": "dashboard"}]
        ),
    ),
    ("network-policy", "none", lambda _, rest: drop(rest, "NetworkPolicy")),
    ("network-policy", "anybody", lambda _, rest: let_in(rest)),
    (
        "network-policy",
        "anybody, the dashboard",
        lambda _, rest: let_in(
            rest, **{"from": [{"namespaceSelector": {}}], "ports": [{"port": "dashboard"}]}
        ),
    ),
    (
        "network-policy",
        "the world, a range",
        lambda _, rest: let_in(
            rest,
            **{
                "from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}],
                "ports": [{"port": 6000, "endPort": 7000}],
            },
        ),
    ),
    (
        "network-policy",
        "of what goes out alone",
        lambda _, rest: of(rest, "NetworkPolicy")["spec"].update(policyTypes=["Egress"]),
    ),
    (
        "network-policy",
        "for other pods",
        lambda job, _: cluster(job)["headGroupSpec"]["template"]["metadata"]["labels"].clear(),
    ),
    (
        "network-policy",
        "for other pods, by an expression",
        lambda _, rest: choose(rest, key=names.APP_LABEL, operator="NotIn", values=[names.APP]),
    ),
    (
        "network-policy",
        "anybody who has not a certain label",
        lambda _, rest: let_in_by(rest, key="quarantine", operator="DoesNotExist"),
    ),
    (
        "network-policy",
        "by an operator that there is not",
        lambda _, rest: choose(rest, key=names.APP_LABEL, operator="in", values=[names.APP]),
    ),
    (
        "service",
        "to the workers",
        lambda _, rest: of(rest, "Service")["spec"]["selector"].pop(names.ROLE_LABEL),
    ),
    (
        "service",
        "to another port",
        lambda _, rest: of(rest, "Service")["spec"]["ports"][0].update(targetPort="metrics"),
    ),
    ("service", "ready or not", lambda _, rest: service(rest, publishNotReadyAddresses=True)),
    (
        "secret-missing",
        "unknown",
        lambda job, _: pod(job)["volumes"].append({"name": "x", "secret": {"secretName": "x"}}),
    ),
    (
        "secret-missing",
        "unknown, of all variables",
        lambda job, _: beside(job, envFrom=[{"secretRef": {"name": "x"}}]),
    ),
    (
        "secret-missing",
        "unknown, before Ray",
        lambda job, _: beside(
            job,
            "initContainers",
            env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "x", "key": "x"}}}],
        ),
    ),
    ("privileges", "root", lambda job, _: pod(job)["securityContext"].pop("runAsNonRoot")),
    (
        "privileges",
        "root by number",
        lambda job, _: pod(job)["securityContext"].update(runAsUser=0),
    ),
    (
        "privileges",
        "all of them",
        lambda job, _: container(job)["securityContext"].update(privileged=True),
    ),
    ("privileges", "the node's network", lambda job, _: pod(job).update(hostNetwork=True)),
    (
        "privileges",
        "escalation",
        lambda job, _: container(job)["securityContext"].pop("allowPrivilegeEscalation"),
    ),
    (
        "privileges",
        "capabilities",
        lambda job, _: container(job)["securityContext"].pop("capabilities"),
    ),
    (
        "privileges",
        "a token of the cluster",
        lambda job, _: pod(job).pop("automountServiceAccountToken"),
    ),
    (
        "keys",
        "none",
        lambda job, _: job["spec"].update(
            entrypoint=job["spec"]["entrypoint"].replace("--api-key-file", "--served-model-name")
        ),
    ),
    (
        "accepted",
        "misspelt",
        lambda job, _: annotate(job, names.ACCEPTED_ANNOTATION, "cpus: a laptop"),
    ),
    ("accepted", "no reason", lambda job, _: annotate(job, names.ACCEPTED_ANNOTATION, "cpu:")),
]


def of(documents: list[Document], kind: str) -> Document:
    return next(each for each in documents if each["kind"] == kind)


def drop(documents: list[Document], kind: str) -> None:
    documents[:] = [each for each in documents if each["kind"] != kind]


@pytest.mark.parametrize(
    ("rule", "break_it"),
    [(rule, break_it) for rule, _, break_it in MISTAKES],
    ids=[f"{rule}, {what}" for rule, what, _ in MISTAKES],
)
def test_each_mistake_is_found(rule: str, break_it: Break) -> None:
    job, *rest = load("rayjob", "gpu")
    break_it(job, rest)

    assert rule in rules([job, *rest])


def test_every_rule_has_a_mistake_that_proves_it() -> None:
    assert {rule for rule, _, _ in MISTAKES} == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


# ------------------------------------------------------------------------------------ the command


def run(documents: list[Document], *flags: str) -> tuple[int, str]:
    text = yaml.safe_dump_all(documents)
    result = CliRunner().invoke(cli, ["lint", "k8s", "-", *flags], input=io.BytesIO(text.encode()))
    return result.exit_code, result.output + str(result.exception or "")


def test_findings_say_why_and_what_to_do() -> None:
    job, *rest = load("rayjob", "gpu")
    del cluster(job)["authOptions"]
    code, output = run([job, *rest])

    assert code == 1
    assert "dashboard: RayJob raywire: spec.rayClusterSpec.authOptions: does not ask" in output
    assert "why: who reaches Ray's dashboard" in output
    assert "fix: authOptions.mode: token" in output
    assert "1 finding, 0 accepted" in output


def test_what_is_accepted_is_reported_and_does_not_fail() -> None:
    job, *rest = load("rayjob", "gpu")
    del cluster(job)["authOptions"]
    job["metadata"]["annotations"] = {names.ACCEPTED_ANNOTATION: "dashboard: nobody else is here\n"}
    code, output = run([job, *rest])

    assert code == 0
    assert "accepted dashboard" in output
    assert "nobody else is here" in output


def test_what_is_not_accepted_with_a_reason_counts() -> None:
    job, *rest = load("rayjob", "gpu")
    del cluster(job)["authOptions"]
    job["metadata"]["annotations"] = {names.ACCEPTED_ANNOTATION: "dashboard:\n"}

    assert rules([job, *rest]) == {"dashboard", "accepted"}


def test_what_kubectl_gets_is_checked_as_well() -> None:
    """A list, with what a cluster adds; one of Kueue's has been resumed by it."""
    job, *rest = load("rayjob", "gpu")
    queued(job, suspend=False)
    job["status"] = {"jobDeploymentStatus": "Running"}
    got = {"apiVersion": "v1", "kind": "List", "items": [job, *rest]}

    assert rules([got]) == set()
    cluster(job)["authOptions"]["mode"] = "disabled"
    assert rules([got]) == {"dashboard"}


def test_a_second_less_than_render_gives_the_head_is_too_short() -> None:
    """And the finding says what the time is for."""
    job, *rest = load("rayjob", "gpu")
    pod(job)["terminationGracePeriodSeconds"] -= 1

    assert [(each.rule, each.what) for each in check([job, *rest])] == [
        (
            "grace",
            "is 54 s; its end takes 55: 5 until no endpoint leads here, 20 for running requests,"
            " 30 for the end of engine cores and Ray",
        )
    ]


@pytest.mark.parametrize(("wait_s", "is_enough"), [(21, False), (24, False), (25, True)])
def test_a_job_has_time_to_end_behind_its_requests(wait_s: int, is_enough: bool) -> None:
    """The server keeps five seconds of Ray's patience for itself."""
    job, *rest = load("rayjob", "gpu")
    job["spec"]["runtimeEnvYAML"] = f"env_vars: {{RAY_JOB_STOP_WAIT_TIME_S: '{wait_s}'}}"

    assert rules([job, *rest]) == (set() if is_enough else {"job-stop"})


@pytest.mark.parametrize(
    ("of_head", "of_worker", "is_enough"), [(55, 54, False), (90, 89, False), (90, 90, True)]
)
def test_workers_have_as_long_as_their_head(of_head: int, of_worker: int, is_enough: bool) -> None:
    job, *rest = load("rayjob", "gpu")
    pod(job)["terminationGracePeriodSeconds"] = of_head
    pod(job, of_worker=True)["terminationGracePeriodSeconds"] = of_worker

    assert rules([job, *rest]) == (set() if is_enough else {"grace"})


REQUIREMENTS = [
    *[("a", "In", ["1", "2"], True), ("a", "In", ["2"], False), ("b", "In", ["1"], False)],
    *[("a", "NotIn", ["2"], True), ("a", "NotIn", ["1"], False), ("b", "NotIn", ["1"], True)],
    *[("a", "Exists", None, True), ("b", "Exists", None, False)],
    *[("a", "DoesNotExist", None, False), ("b", "DoesNotExist", None, True)],
]


@pytest.mark.parametrize(("key", "operator", "values", "chooses"), REQUIREMENTS)
def test_a_policy_may_choose_pods_by_expressions(
    key: str, operator: str, values: list[str] | None, chooses: bool
) -> None:
    """Ours have the label `a: "1"` here, and no `b`."""
    job, *rest = load("rayjob", "gpu")
    for group in (cluster(job)["headGroupSpec"], cluster(job)["workerGroupSpecs"][0]):
        group["template"]["metadata"]["labels"]["a"] = "1"
    choose(rest, key=key, operator=operator, values=values)

    assert rules([job, *rest]) == (set() if chooses else {"network-policy"})


def test_whom_an_expression_lets_in_is_not_anybody() -> None:
    """A label that only some have."""
    job, *rest = load("rayjob", "gpu")
    let_in_by(rest, key=names.GATEWAY_LABEL, operator="In", values=["true"])

    assert rules([job, *rest]) == set()


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "HF_TOKEN_PATH"])
def test_what_only_sounds_like_a_secret_is_let_be(name: str) -> None:
    job, *rest = load("rayjob", "gpu")
    container(job)["env"].append({"name": name, "value": "1"})

    assert rules([job, *rest]) == set()


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "PASSWORD"]
)
def test_secrets_are_known_by_their_names(name: str) -> None:
    job, *rest = load("rayjob", "gpu")
    container(job)["env"].append({"name": name, "value": "1"})

    assert rules([job, *rest]) == {"secrets"}


def test_a_rule_says_once_why() -> None:
    """However many places it has found."""
    job, *rest = load("rayjob", "gpu")
    for of_worker in (False, True):
        del pod(job, of_worker=of_worker)["shareProcessNamespace"]
    code, output = run([job, *rest])

    assert code == 1
    assert output.count("reaper: RayJob raywire: spec.rayClusterSpec") == 2
    assert output.count("why: ") == output.count("fix: ") == 1


def test_a_secret_in_clear_is_told_with_its_container() -> None:
    job, *rest = load("rayjob", "gpu")
    beside(job, "initContainers", env=[{"name": "HF_TOKEN", "value": "abc"}])

    [finding] = check([job, *rest])
    assert finding.where.endswith("workerGroupSpecs[0] container other env")


def test_fault_tolerance_of_old_is_let_be() -> None:
    """By annotation and variable, as the operator takes it, too."""
    job, *rest = load("rayjob", "gpu")
    annotate(job, "ray.io/ft-enabled", "true")
    container(job)["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"})

    assert rules([job, *rest]) == set()


def test_machines_read_json() -> None:
    code, output = run(load("rayjob", "cpu-demo"), "--json")

    assert code == 0
    assert {finding["rule"] for finding in json.loads(output)} == {"cpu"}


def test_nothing_to_check_is_a_mistake() -> None:
    code, output = run([{"kind": "Service"}, {"kind": "RayService"}])

    assert code != 0
    assert "nothing to check: no RayJob or RayCluster in these files, only RayService, S" in output


def test_who_names_a_folder_learns_how_to_build_it() -> None:
    result = CliRunner().invoke(cli, ["lint", "k8s", str(K8S / "rayjob" / "gpu")])

    assert result.exit_code == 2
    assert "kubectl kustomize" in result.output.replace("\n", " ")


def test_a_folder_that_builds_nothing_is_not_to_be_built() -> None:
    result = CliRunner().invoke(cli, ["lint", "k8s", str(K8S)])

    assert result.exit_code == 2
    assert "build one of its overlays" in result.output.replace("\n", " ")


def test_a_manifest_of_somebody_elses_server_is_checked_too() -> None:
    """Without any of our names; what cannot be known is no finding, and nothing crashes."""
    found = rules(
        [
            {
                "kind": "RayCluster",
                "metadata": {"name": "other"},
                "spec": {
                    "headGroupSpec": {"template": {"spec": {"containers": [{"name": "ray"}]}}},
                    "workerGroupSpecs": [
                        {
                            "replicas": 2,
                            "template": {"spec": {"containers": [{"image": "rayproject/ray"}]}},
                        }
                    ],
                },
            }
        ]
    )

    assert found >= {"dashboard", "pinned", "versions", "probes", "privileges", "memory"}
    assert not found & {"cpu", "gpu", "shm", "grace", "drain", "keys"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.data())
def test_no_manifest_is_too_broken_to_check(data: st.DataObject) -> None:
    """Any part of a good one may be replaced by anything."""
    job, *rest = load("rayjob", "gpu")
    place: Any = job["spec"]
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if not place[key] or not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)

    assert {finding.rule for finding in check([job, *rest])} <= {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("quantity", "number"),
    [
        *[("64Mi", 64 << 20), ("1500m", 1.5), ("2", 2), (3, 3), ("1G", 10**9), ("8Ki", 8192)],
        *[("1e9", 10**9), ("2Pi", 2 << 50), ("four", None), ("512ki", None)],
    ],
)
def test_quantities_are_numbers(quantity: object, number: float | None) -> None:
    assert amount(quantity) == number
