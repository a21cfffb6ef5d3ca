"""Rules about Ray and its operator: what its schema does not say, and what it does with probes."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.kubernetes import names
from cluster.kubernetes.lint.findings import Mistake, Rule
from cluster.kubernetes.lint.workload import Bundle, Workload
from cluster.ray_refusals import OLDEST_RAY

_RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
_TOKEN_SINCE = (2, 52)
_OF_REDIS = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME")
_ALPHA = ("networkPolicy", "tlsOptions")
"""Fields of a cluster that the operator heeds only with a feature gate, as of its version 1.7."""
_RAY_IMAGE = re.compile(r".*rayproject/ray(?:-ml)?:(\d+\.\d+\.\d+).*")
_MOST_QUEUED_GROUPS = 7


def _probes(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for pod in workload.pods:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if not pod.container.get(probe):
                yield Mistake(f"{pod.place} {probe}", "is missing")
    head = workload.head.container
    for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/live")):
        if workload.topology is not None and head.get(probe) and path not in str(head[probe]):
            yield Mistake(f"{workload.head.place} {probe}", f"does not ask the server's {path}")


def _probe_waits(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if not workload.is_job:
        return
    ports = {workload.port, workload.port_name} - {None}
    for probe in ("startupProbe", "readinessProbe"):
        asked = workload.head.container.get(probe) or {}
        for way in ("httpGet", "tcpSocket", "grpc"):
            if (asked.get(way) or {}).get("port") in ports:
                yield Mistake(f"{workload.head.place} {probe}", "waits for the job's server")


def _liveness(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    asked = str(workload.head.container.get("livenessProbe") or "")
    for path in ("/health", "/ready"):
        if f"{path}'" in asked or f"{path} " in asked or f'{path}"' in asked:
            yield Mistake(f"{workload.head.place} livenessProbe", f"asks {path}")


def _reachable(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    service = (workload.cluster.get("headGroupSpec") or {}).get("headService") or {}
    if not (service.get("spec") or {}).get("publishNotReadyAddresses") and "/ready" in str(
        workload.head.container.get("readinessProbe") or ""
    ):
        yield Mistake(f"{workload.head.place}.headService", "publishes only a head that is ready")


def _versions(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    images = {pod.image for pod in workload.pods}
    if len(images) > 1:
        yield Mistake(f"{workload.cluster_place} images", " and ".join(sorted(images)))
    said = workload.cluster.get("rayVersion")
    for pod in workload.pods:
        matched = _RAY_IMAGE.fullmatch(pod.image)
        if said and matched and matched[1] != said:
            yield Mistake(f"{pod.place} image", f"has Ray {matched[1]}, rayVersion says {said}")


def _pinned(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for pod in workload.pods:
        name = pod.image.rpartition("/")[2]
        if "@" not in name and (":" not in name or name.endswith(":latest")):
            what = f"{pod.image} may be another tomorrow" if pod.image else "is missing"
            yield Mistake(f"{pod.place} image", what)


def _ray_version(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    place, said = f"{workload.cluster_place}.rayVersion", workload.cluster.get("rayVersion")
    if not said:
        yield Mistake(place, "is missing")
        return
    numbers = re.match(r"(\d+)\.(\d+)", str(said))
    if numbers is None:
        yield Mistake(place, f"{said} is no version")
        return
    version = (int(numbers[1]), int(numbers[2]))
    if version < _TOKEN_SINCE:
        yield Mistake(place, f"{said} knows no tokens, which came with 2.52")
    elif workload.topology is not None and version < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        yield Mistake(place, f"{said} is too old for raywire, which wants {oldest} at least")


def _start_params(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    groups: list[tuple[str, Mapping[str, Any]]] = [
        (workload.head.place, workload.cluster.get("headGroupSpec") or {}),
        *(
            (pod.place, group)
            for pod, group in zip(
                workload.workers, workload.cluster.get("workerGroupSpecs") or (), strict=True
            )
        ),
    ]
    for place, group in groups:
        params = group.get("rayStartParams") or {}
        if group.get("resources") and (both := sorted(set(params) & set(_RESOURCE_PARAMS))):
            yield Mistake(f"{place}.rayStartParams", f"{', '.join(both)} beside `resources`")
        if "labels" in params:
            yield Mistake(f"{place}.rayStartParams", "has labels; the group has a field for them")


def _fault_tolerance(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    options = workload.cluster.get("gcsFaultToleranceOptions")
    if not options and "ray.io/ft-enabled" in workload.annotations:
        return  # as it was done before there were options
    for name in _OF_REDIS:
        if name in workload.head.variables:
            yield Mistake(f"{workload.head.place} env", f"has {name}")
    for name in ("redis-password", "redis-username"):
        if name in workload.head.start_params:
            yield Mistake(f"{workload.head.place}.rayStartParams", f"has {name}")
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if options and name in workload.annotations:
            yield Mistake(f"annotation {name}", "beside gcsFaultToleranceOptions")


def _alpha(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for field in _ALPHA:
        if workload.cluster.get(field):
            yield Mistake(f"{workload.cluster_place}.{field}", "is ignored without its gate")
    if (workload.cluster.get("gcsFaultToleranceOptions") or {}).get("backend") == "rocksdb":
        place = f"{workload.cluster_place}.gcsFaultToleranceOptions.backend"
        yield Mistake(place, "rocksdb is refused without its gate")


def _queue(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    """What Kueue refuses, or what it and the manifest would pull to and fro."""
    if names.QUEUE_LABEL not in workload.labels:
        return
    if "suspend" in workload.spec and "status" not in workload.document:
        yield Mistake("spec.suspend", "is Kueue's to set: each apply would end or start the server")
    if workload.is_job and not workload.spec.get("shutdownAfterJobFinishes"):
        yield Mistake("spec.shutdownAfterJobFinishes", "is not true, and Kueue refuses the job")
    if workload.spec.get("clusterSelector"):
        yield Mistake("spec.clusterSelector", "has a cluster that Kueue has not let in")
    if len(workload.workers) > _MOST_QUEUED_GROUPS:
        place = f"{workload.cluster_place}.workerGroupSpecs"
        yield Mistake(place, f"Kueue takes {_MOST_QUEUED_GROUPS} groups at most")


def _job_rules(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    spec = workload.spec
    if not workload.is_job:
        return
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        yield Mistake("spec.ttlSecondsAfterFinished", "needs shutdownAfterJobFinishes")
    if spec.get("backoffLimit") and spec.get("clusterSelector"):
        yield Mistake("spec.backoffLimit", "cannot be with clusterSelector")
    if spec.get("backoffLimit") and spec.get("submissionMode") == "InteractiveMode":
        yield Mistake("spec.backoffLimit", "cannot be with InteractiveMode")
    if spec.get("submissionMode") == "SidecarMode":
        if spec.get("submitterPodTemplate") or spec.get("submitterConfig"):
            yield Mistake("spec.submissionMode", "SidecarMode takes no submitter settings")
        if workload.head.spec.get("restartPolicy") != "Never":
            yield Mistake(f"{workload.head.place} restartPolicy", "SidecarMode wants Never")


def _comes_back(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if workload.is_job and workload.topology is not None and not workload.spec.get("backoffLimit"):
        yield Mistake("spec.backoffLimit", "is 0: a server that ends is not started again")
    if workload.is_job and (deadline := workload.spec.get("activeDeadlineSeconds")):
        yield Mistake("spec.activeDeadlineSeconds", f"ends the server after {deadline} s, for good")


def _submitter(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    mode = workload.spec.get("submissionMode", "K8sJobMode")
    if workload.is_job and workload.topology is not None and mode == "K8sJobMode":
        yield Mistake(
            "spec.submissionMode", "K8sJobMode keeps a pod that follows the log for weeks"
        )


def _reaper(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for pod in workload.pods:
        command = " ".join(map(str, pod.container.get("command") or ()))
        if not pod.spec.get("shareProcessNamespace") and "tini" not in command:
            yield Mistake(pod.place, "nothing collects processes whose parents are gone")


RULES = (
    Rule(
        name="probes",
        why="the operator's own probes look at Ray alone: a server that is dead or hung stays",
        fix="give the head probes that ask Ray, then /ready and /live (`raywire render k8s`)",
        check=_probes,
    ),
    Rule(
        name="probe-deadlock",
        why="the operator submits the job when the pod is ready, and the job is the server: both"
        " wait for ever",
        fix="ask the server only if something listens on its port, as `raywire render k8s` does",
        check=_probe_waits,
    ),
    Rule(
        name="liveness",
        why="it is 503 while a model loads, and a restart then begins the loading anew",
        fix="ask /live, which is 503 only where a restart is the remedy",
        check=_liveness,
    ),
    Rule(
        name="head-service",
        why="a head that loads or drains is not ready, and its workers cannot find it then",
        fix="headGroupSpec.headService.spec.publishNotReadyAddresses: true",
        check=_reachable,
    ),
    Rule(
        name="versions",
        why="head, workers and driver need the same Ray and Python, and raywire refuses a rank"
        " whose code differs",
        fix="use one image",
        check=_versions,
    ),
    Rule(
        name="pinned",
        why="a pod that is made anew may get other code than the rest",
        fix="name a version or a digest",
        check=_pinned,
    ),
    Rule(
        name="ray-version",
        why="the operator chooses probes and authentication by it; raywire refuses an old Ray",
        fix=f"set rayVersion to the Ray in the image, and have {'.'.join(map(str, OLDEST_RAY))} at"
        " least",
        check=_ray_version,
    ),
    Rule(
        name="start-params",
        why="the operator refuses the cluster",
        fix="say it in one place",
        check=_start_params,
    ),
    Rule(
        name="fault-tolerance",
        why="the operator takes these settings in one place; and without the head there is no"
        " server, so this keeps no request",
        fix="leave it out, or say all of it in gcsFaultToleranceOptions",
        check=_fault_tolerance,
    ),
    Rule(
        name="alpha",
        why="it is an alpha feature of the operator, which is off unless it was switched on",
        fix="do without it, or accept this where your operator has the gate",
        check=_alpha,
    ),
    Rule(
        name="queue",
        why="Kueue suspends a server of its queues when it is made, and resumes it when all of it"
        " has room",
        fix="leave suspend out, set shutdownAfterJobFinishes, have few groups of workers",
        check=_queue,
    ),
    Rule(
        name="job",
        why="the operator refuses the job",
        fix="see KubeRay's RayJob",
        check=_job_rules,
    ),
    Rule(
        name="comes-back",
        why="raywire ends when one of its processes dies, for somebody to start it again",
        fix="set backoffLimit, and no deadline",
        check=_comes_back,
    ),
    Rule(
        name="submitter",
        why="when that pod is moved it submits again, under a name that exists",
        fix="submissionMode: HTTPMode",
        check=_submitter,
    ),
    Rule(
        name="reaper",
        why="a dead raylet stays as a zombie, its workers believe that it lives and do not end",
        fix="shareProcessNamespace: true, or tini as the container's first process",
        check=_reaper,
    ),
)
