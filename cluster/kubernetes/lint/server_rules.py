"""Rules about the server: whether its pods hold what it is, and how it begins and ends."""

from collections.abc import Iterator, Mapping

from cluster import ray_job
from cluster.environment import Environment
from cluster.kubernetes.lint.findings import Mistake, Rule
from cluster.kubernetes.lint.workload import (
    DEFAULT_DRAIN_S,
    GPU,
    Bundle,
    Pod,
    Workload,
    processes_of,
)
from cluster.kubernetes.stop_times import (
    AFTER_DRAIN_S,
    PRE_STOP_S,
    head_grace_s,
    head_grace_told,
    job_stop_s,
)
from workers import ring
from workers.executor import BROADCAST_CHUNKS
from workers.worker_handle import RESPONSE_CHUNKS

_MIB = 1 << 20
_LEAST_OBJECT_STORE = 75 * _MIB


def _cpu(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if (topology := workload.topology) is None:
        return
    num_pods = sum(pod.replicas for pod in workload.workers)
    head, each = processes_of(topology, num_pods)
    for pod in workload.pods:
        wanted = head if pod.is_head else each
        asked = pod.resource("cpu")
        if asked is None or asked < wanted:
            says = "nothing" if asked is None else f"{asked:g}"
            yield Mistake(
                f"{pod.place} container resources",
                f"asks for {says} of the processor; its processes want {wanted} vCPUs",
            )


def _gpu(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if (topology := workload.topology) is None:
        return
    there = sum((pod.limit(GPU) or 0) * pod.replicas for pod in workload.workers)
    wants = workload.flag("--device") == "cuda" or there > 0 or (workload.head.limit(GPU) or 0) > 0
    if wants and there < topology.num_workers:
        yield Mistake(
            f"{workload.cluster_place}.workerGroupSpecs",
            f"{topology.num_workers} workers need a GPU each, and worker pods have {there:g}",
        )
    if workload.head.limit(GPU):
        yield Mistake(
            workload.head.place, "the head has GPUs, and no engine runs there: they stay idle"
        )


def _shm(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if (topology := workload.topology) is None:
        return
    num_pods = sum(pod.replicas for pod in workload.workers)
    engines = -(-topology.num_engines // max(1, num_pods))
    num_workers = topology.workers_per_engine
    for pod in workload.workers:
        chunk_bytes = _chunk_bytes(pod.environment)
        calls = ring.Layout(BROADCAST_CHUNKS, chunk_bytes, num_workers).num_bytes
        replies = ring.Layout(RESPONSE_CHUNKS, chunk_bytes, 1).num_bytes
        rings = engines * (calls + num_workers * replies)
        store = float(pod.start_params.get("object-store-memory") or _LEAST_OBJECT_STORE)
        if pod.shm_bytes is not None and pod.shm_bytes < rings + store:
            yield Mistake(
                f"{pod.place} volume at /dev/shm",
                f"holds {pod.shm_bytes / _MIB:.0f} MiB; rings and object store take"
                f" {(rings + store) / _MIB:.0f}",
            )


def _chunk_bytes(environment: Mapping[str, str]) -> int:
    given = environment.get("RAYWIRE_MQ_MAX_CHUNK_BYTES_MB", "")
    return int(given) * _MIB if given.isdecimal() else Environment().mq_max_chunk_bytes


def _shm_in_memory(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for pod in workload.pods:
        limit = pod.limit("memory")
        if pod.shm_bytes is not None and limit is not None and pod.shm_bytes > limit / 2:
            yield Mistake(
                f"{pod.place} volume at /dev/shm",
                f"may take {pod.shm_bytes / _MIB:.0f} MiB of a memory limit of {limit / _MIB:.0f}",
            )


def _memory(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for pod in workload.pods:
        if pod.limit("memory") is None:
            yield Mistake(f"{pod.place} container resources", "has no memory limit")
        elif pod.resource("memory") != pod.limit("memory"):
            yield Mistake(f"{pod.place} container resources", "requests less memory than its limit")


def _cpu_limit(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for pod in workload.workers:
        limit = pod.limit("cpu")
        if limit is not None and pod.limit(GPU) and limit != pod.resource("cpu"):
            yield Mistake(f"{pod.place} container resources", f"is held back at {limit:g} vCPUs")


def _head_as_worker(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if workload.workers and str(workload.head.start_params.get("num-cpus")) != "0":
        yield Mistake(f"{workload.head.place}.rayStartParams", 'has no `num-cpus: "0"`')


def _fixed_size(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if workload.cluster.get("enableInTreeAutoscaling"):
        yield Mistake(f"{workload.cluster_place}.enableInTreeAutoscaling", "is true")
    for index, group in enumerate(workload.cluster.get("workerGroupSpecs") or ()):
        sizes = {group.get(key) for key in ("replicas", "minReplicas", "maxReplicas")}
        if len(sizes) != 1:
            yield Mistake(
                f"{workload.cluster_place}.workerGroupSpecs[{index}]",
                "replicas, minReplicas and maxReplicas differ",
            )


def _grace(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if workload.topology is None:
        return
    least = head_grace_s(workload.drain_s)
    of_head = _grace_s(workload.head)
    if of_head < least:
        yield Mistake(
            f"{workload.head.place} terminationGracePeriodSeconds",
            f"is {of_head} s; its end takes {head_grace_told(workload.drain_s)}",
        )
    for pod in workload.workers:
        if _grace_s(pod) < (needed := max(least, of_head)):
            yield Mistake(
                f"{pod.place} terminationGracePeriodSeconds",
                f"is {_grace_s(pod)} s; the head's streams may need its engines for {needed}",
            )


def _grace_s(pod: Pod) -> int:
    given = pod.spec.get("terminationGracePeriodSeconds")
    return given if isinstance(given, int) else 30


def _job_stop(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if not workload.is_job or workload.topology is None:
        return
    given = str(workload.runtime_environment.get("RAY_JOB_STOP_WAIT_TIME_S", "3"))
    wait_s = float(given) if given.isdecimal() else 0.0
    job = Environment(is_ray_job=True, ray_job_stop_wait_s=wait_s)
    if (left_s := ray_job.drain_s(workload.drain_s, job)) < workload.drain_s:
        yield Mistake(
            "spec.runtimeEnvYAML env_vars.RAY_JOB_STOP_WAIT_TIME_S",
            f"is {given} s; of it running requests have {left_s:g}, instead of"
            f" {workload.drain_s:g}",
        )


def _drain(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if workload.topology is None:
        return
    hook = str((workload.head.container.get("lifecycle") or {}).get("preStop", ""))
    if "drain" not in hook and "job stop" not in hook:
        yield Mistake(f"{workload.head.place} lifecycle.preStop", "does not drain the server")
    for pod in workload.workers:
        if not (pod.container.get("lifecycle") or {}).get("preStop"):
            yield Mistake(f"{pod.place} lifecycle.preStop", "does not wait for the head's streams")


def _where_the_driver_runs(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for key in ("entrypointNumCpus", "entrypointNumGpus"):
        if workload.spec.get(key):
            yield Mistake(f"spec.{key}", "lets the driver, with the HTTP port, land on any node")


def _port(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if workload.topology is None:
        return
    ports = [
        port.get("containerPort")
        for container in workload.head.containers
        for port in container.get("ports") or ()
    ]
    if workload.port not in ports:
        yield Mistake(f"{workload.head.place} ports", f"{workload.port}, the server's, is missing")


RULES = (
    Rule(
        name="cpu",
        why="each process wants two vCPUs, and a worker that waits for one makes its group wait",
        fix="ask for what `raywire plan` says, or accept it for a demo",
        check=_cpu,
    ),
    Rule(
        name="gpu",
        why="each worker takes a GPU of its own pod, the driver takes none: too few, and the job"
        " waits for ever; on the head, and they are paid for and idle",
        fix="set nvidia.com/gpu of the worker pods to tensor × pipeline size × engines in the pod",
        check=_gpu,
    ),
    Rule(
        name="shm",
        why="engine core and workers talk through shared memory; what does not fit ends the start",
        fix="raise the volume's sizeLimit, or set RAYWIRE_MQ_MAX_CHUNK_BYTES_MB lower",
        check=_shm,
    ),
    Rule(
        name="shm-memory",
        why="what lies in /dev/shm counts as the container's memory: the kernel kills it for that",
        fix="raise the memory limit by the size of /dev/shm",
        check=_shm_in_memory,
    ),
    Rule(
        name="memory",
        why="a pod that has less than it may use is the first to be killed when a node runs short",
        fix="set memory requests and limits to the same",
        check=_memory,
    ),
    Rule(
        name="cpu-limit",
        why="a core that is held back in the middle of a step looks like one that hangs",
        fix="leave the CPU limit out, or make it the request",
        check=_cpu_limit,
    ),
    Rule(
        name="head-as-worker",
        why="an engine on the head competes with the API servers and Ray's own processes",
        fix='set `num-cpus: "0"` in the head\'s rayStartParams',
        check=_head_as_worker,
    ),
    Rule(
        name="fixed-size",
        why="all engines must be there before the server serves, and one that is scaled in ends it",
        fix="switch autoscaling off and set the three to the same",
        check=_fixed_size,
    ),
    Rule(
        name="grace",
        why="Kubernetes kills what still runs after it, in the middle of an answer",
        fix=f"terminationGracePeriodSeconds: --shutdown-timeout + {PRE_STOP_S + AFTER_DRAIN_S}, or"
        " more; of workers no less than the head's",
        check=_grace,
    ),
    Rule(
        name="job-stop",
        why="Ray kills a job 3 s after it has asked it to stop, so the server's drain ends before",
        fix="RAY_JOB_STOP_WAIT_TIME_S in runtimeEnvYAML's env_vars: --shutdown-timeout +"
        f" {job_stop_s(0)}",
        check=_job_stop,
    ),
    Rule(
        name="drain",
        why="the pod's end kills Ray, and with it server or engines, before the streams have ended",
        fix=f"preStop of the head: `sleep {PRE_STOP_S}; raywire drain --timeout"
        f" {job_stop_s(DEFAULT_DRAIN_S)}`; of workers: wait until their engine cores have ended"
        " (`raywire render k8s`)",
        check=_drain,
    ),
    Rule(
        name="driver-place",
        why="the Service and the probes look for the server on the head",
        fix="leave entrypointNumCpus and entrypointNumGpus out: the driver then runs on the head",
        check=_where_the_driver_runs,
    ),
    Rule(
        name="port",
        why="Services and NetworkPolicies name ports of containers",
        fix="list the server's --port among the head container's ports",
        check=_port,
    ),
)
