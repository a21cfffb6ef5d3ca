"""The documents of one server on KubeRay, as dictionaries. Pure.

RayJob: the managed form. The operator makes the cluster, submits our server as its driver, and
makes both anew when it ends. RayCluster: a cluster that stays, for `ray job submit`. Around either
are the same documents (`surroundings`). RayService is not used: it deploys Ray Serve applications.
"""

from dataclasses import dataclass
from typing import Any, Literal

import yaml

from cluster.kubernetes import names, probes
from cluster.kubernetes.sizing import MIB, OBJECT_STORE_BYTES, PodSize, Sizes
from cluster.kubernetes.stop_times import PRE_STOP_S

Document = dict[str, Any]
Kind = Literal["rayjob", "raycluster"]

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that is gone is noticed in about ten seconds, not in a minute.
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One server, decided."""

    name: str
    entrypoint: str
    """The command line of the server."""
    sizes: Sizes
    image: str
    ray_version: str
    port: int = 8000
    has_gpus: bool = False
    is_tls: bool = False
    """Whether the server speaks HTTPS itself, with the certificate of a Secret."""
    queue: str | None = None
    """Kueue's, which the server waits in until there is room for all of it."""
    cache_claim: str | None = None
    """A PersistentVolumeClaim for models and kernels; None: each pod has its own, and loses it."""
    accepted_findings: tuple[tuple[str, str], ...] = ()
    """Rules of `raywire lint k8s` and why they do not count here."""


def custom_resource(kind: Kind, deployment: Deployment) -> Document:
    """The RayJob or RayCluster."""
    return _ray_job(deployment) if kind == "rayjob" else _ray_cluster(deployment)


def _ray_job(deployment: Deployment) -> Document:
    environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(deployment.sizes.job_stop_s)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(deployment),
        "spec": {
            # However the server ends, in order or not, the operator is to make another: only
            # failures are tried again. The shell lives until the server has drained.
            "entrypoint": f"trap : TERM; {deployment.entrypoint} ; exit 1",
            "runtimeEnvYAML": yaml.safe_dump({"env_vars": environment}),
            # No pod that follows the log for weeks, and submits a second time when it is moved.
            "submissionMode": "HTTPMode",
            "backoffLimit": 1000,  # over the job's whole life
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 60,
            "rayClusterSpec": _cluster_spec(deployment),
        },
    }


def _ray_cluster(deployment: Deployment) -> Document:
    metadata = _metadata(deployment)
    entrypoint = f"exec {deployment.entrypoint}"
    metadata.setdefault("annotations", {})[names.ENTRYPOINT_ANNOTATION] = entrypoint
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata,
        "spec": _cluster_spec(deployment),
    }


def _metadata(deployment: Deployment) -> Document:
    labels = {names.APP_LABEL: names.APP}
    if deployment.queue is not None:
        labels[names.QUEUE_LABEL] = deployment.queue
    metadata: Document = {"name": deployment.name, "labels": labels}
    if deployment.accepted_findings:
        lines = [f"{rule}: {reason}\n" for rule, reason in deployment.accepted_findings]
        metadata["annotations"] = {names.ACCEPTED_ANNOTATION: "".join(lines)}
    return metadata


def _cluster_spec(deployment: Deployment) -> Document:
    sizes = deployment.sizes
    head_service = {"spec": {"publishNotReadyAddresses": True}}
    return {
        "rayVersion": deployment.ray_version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "rayStartParams": {
                "dashboard-host": "0.0.0.0",
                "num-cpus": "0",
                "object-store-memory": str(OBJECT_STORE_BYTES),
            },
            # Workers need a head that loads or drains, too.
            "headService": head_service,
            "template": _head_template(deployment),
        },
        "workerGroupSpecs": [
            {
                "groupName": "engines",
                "replicas": sizes.num_workers,
                "minReplicas": sizes.num_workers,
                "maxReplicas": sizes.num_workers,
                "rayStartParams": {
                    "num-cpus": str(_ray_cpus(deployment)),
                    "object-store-memory": str(OBJECT_STORE_BYTES),
                },
                "template": _worker_template(deployment),
            }
        ],
    }


def _ray_cpus(deployment: Deployment) -> int:
    """What Ray may hand out on a worker pod: as much as its ranks reserve, whatever the pod has."""
    return deployment.sizes.worker.num_processes


# ------------------------------------------------------------------------------------------- pods


def _head_template(deployment: Deployment) -> Document:
    ports = [
        {"name": "gcs", "containerPort": names.GCS_PORT},
        {"name": "dashboard", "containerPort": names.DASHBOARD_PORT},
        {"name": "metrics", "containerPort": names.METRICS_PORT},
        {"name": "http", "containerPort": deployment.port},
    ]
    container = {
        **_container(deployment, deployment.sizes.head, ports),
        **probes.head_probes(deployment.port, is_tls=deployment.is_tls),
        "lifecycle": {"preStop": {"exec": {"command": ["bash", "-c", pre_stop(deployment)]}}},
    }
    secrets = _secrets(deployment)
    container["volumeMounts"] = [*container["volumeMounts"], *(mount for mount, _ in secrets)]
    template = _template(
        deployment, "head", container, deployment.sizes.head, deployment.sizes.head_grace_s
    )
    template["spec"]["volumes"] += [volume for _, volume in secrets]
    return template


def _secrets(deployment: Deployment) -> list[tuple[Document, Document]]:
    """Mount and volume of each Secret that the server reads as files."""
    keys = (names.API_KEYS, names.METRICS_KEY)
    found = [_secret("keys", names.KEYS_SECRET, names.KEYS_FOLDER, keys)]
    if deployment.is_tls:
        pair = (names.CERTIFICATE, names.PRIVATE_KEY)
        found.append(_secret("tls", names.TLS_SECRET, names.TLS_FOLDER, pair))
    return found


def _secret(
    name: str, secret: str, folder: str, keys: tuple[str, ...]
) -> tuple[Document, Document]:
    mount = {"name": name, "mountPath": folder, "readOnly": True}
    volume = {
        "secretName": secret,
        "defaultMode": 0o440,
        "items": [{"key": key, "path": key} for key in keys],
    }
    return mount, {"name": name, "secret": volume}


def pre_stop(deployment: Deployment) -> str:
    """What the head runs before it is stopped: the endpoint is taken out everywhere, then the
    server drains."""
    drain = f"raywire drain --port {deployment.port} --timeout {deployment.sizes.job_stop_s}"
    return f"sleep {PRE_STOP_S}; {drain}"


def worker_pre_stop(sizes: Sizes) -> str:
    """What a worker pod runs before it is stopped: where all pods are stopped at once, the head's
    streams need it until they have ended."""
    return (
        f"for i in $(seq {sizes.head_grace_s}); do pgrep -f '^ray::EngineCore' >/dev/null || break;"
        " sleep 1; done"
    )


def _worker_template(deployment: Deployment) -> Document:
    sizes = deployment.sizes
    ports = [{"name": "metrics", "containerPort": names.METRICS_PORT}]
    container = {**_container(deployment, sizes.worker, ports), **probes.worker_probes()}
    container["lifecycle"] = {
        "preStop": {"exec": {"command": ["bash", "-c", worker_pre_stop(sizes)]}}
    }
    template = _template(deployment, "worker", container, sizes.worker, sizes.worker_grace_s)
    if deployment.has_gpus:
        template["spec"]["tolerations"] = [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
        template["spec"]["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {names.ROLE_LABEL: "worker"}},
            }
        ]
    return template


def _template(
    deployment: Deployment, role: str, container: Document, size: PodSize, grace_s: int
) -> Document:
    cache: Document = {"name": "cache", "emptyDir": {}}
    if deployment.cache_claim is not None:
        cache = {
            "name": "cache",
            "persistentVolumeClaim": {"claimName": deployment.cache_claim},
        }
    shm = {"medium": "Memory", "sizeLimit": quantity(size.shm_bytes)}
    return {
        "metadata": {"labels": {names.APP_LABEL: names.APP, names.ROLE_LABEL: role}},
        "spec": {
            "serviceAccountName": names.APP,
            "automountServiceAccountToken": False,
            # Its first process collects children whose parents are gone; the container's own does
            # not, and Ray would take a dead raylet for a living one.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "shm", "emptyDir": shm},
                {"name": "ray", "emptyDir": {"sizeLimit": "2Gi"}},
                cache,
            ],
        },
    }


def _container(deployment: Deployment, size: PodSize, ports: list[Document]) -> Document:
    requests = {"cpu": cpu_quantity(size.vcpus), "memory": quantity(size.memory_bytes)}
    # No limit of the processor: a group of workers waits for the one that is held back.
    limits = {"memory": requests["memory"]}
    if size.gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(size.gpus)
    environment = {
        **_RAY_ENVIRONMENT,
        "RAYWIRE_CACHE_DIR": names.CACHE_FOLDER,
        "HF_HOME": f"{names.CACHE_FOLDER}/huggingface",
    }
    token = {"name": names.KEYS_SECRET, "key": names.HUB_TOKEN, "optional": True}
    return {
        "name": names.CONTAINER,
        "image": deployment.image,
        "imagePullPolicy": "IfNotPresent",
        "env": [
            *({"name": name, "value": value} for name, value in environment.items()),
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}},
        ],
        "ports": ports,
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "ray", "mountPath": "/tmp/ray"},
            {"name": "cache", "mountPath": names.CACHE_FOLDER},
        ],
    }


def quantity(num_bytes: int) -> str:
    """Bytes, as Kubernetes writes them."""
    return f"{num_bytes // MIB}Mi"


def cpu_quantity(vcpus: float) -> str:
    return str(int(vcpus)) if float(vcpus).is_integer() else f"{round(vcpus * 1000)}m"
