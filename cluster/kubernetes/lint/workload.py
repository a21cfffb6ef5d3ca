"""What RayJobs and RayClusters say, in our words. Anybody's: what is missing is empty here, and for
the rules to judge."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from cluster.kubernetes import names
from cluster.plan import VCPUS_PER_PROCESS, Topology
from engine.errors import ConfigError

Document = Mapping[str, Any]

KINDS = ("RayJob", "RayCluster")
GPU = "nvidia.com/gpu"
DEFAULT_DRAIN_S = 20.0
DEFAULT_PORT = 8000

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_UNITS |= {f"{each}i": 1024.0**power for power, each in enumerate("KMGTPE", start=1)}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)(m|[kMGTPE]|[KMGTPE]i)?")
_SIZES = {
    "tensor_parallel_size": ("-tp", "--tensor-parallel-size"),
    "pipeline_parallel_size": ("-pp", "--pipeline-parallel-size"),
    "data_parallel_size": ("-dp", "--data-parallel-size"),
    "api_server_count": ("--api-server-count",),
}


def amount(quantity: object) -> float | None:
    """A quantity of Kubernetes as a number; None if it is none."""
    matched = _QUANTITY.fullmatch(str(quantity))
    if matched is None:
        return None
    return float(matched[1]) * _UNITS[matched[2] or ""]


@dataclass(frozen=True)
class Pod:
    """One pod template."""

    place: str
    template: Document
    start_params: Mapping[str, str]
    replicas: int
    is_head: bool

    @cached_property
    def spec(self) -> Document:
        return _at(self.template, "spec")

    @cached_property
    def container(self) -> Document:
        """Ray's: the first."""
        containers = self.spec.get("containers") or [{}]
        return containers[0] or {}

    @cached_property
    def image(self) -> str:
        return str(self.container.get("image", ""))

    @property
    def containers(self) -> list[Document]:
        """All of them, also those that run before the others."""
        kinds = (self.spec.get(kind) or () for kind in ("containers", "initContainers"))
        return [each for kind in kinds for each in kind if each]

    def resource(self, name: str) -> float | None:
        """What is asked: the request, or the limit where only that is given."""
        resources = _at(self.container, "resources")
        for kind in ("requests", "limits"):
            if (given := _at(resources, kind).get(name)) is not None:
                return amount(given)
        return None

    def limit(self, name: str) -> float | None:
        given = _at(_at(self.container, "resources"), "limits").get(name)
        return None if given is None else amount(given)

    @property
    def shm_bytes(self) -> float | None:
        """Of /dev/shm; None where the manifest does not say (then the operator makes it as large as
        the memory limit)."""
        for mount in self.container.get("volumeMounts") or ():
            if mount.get("mountPath") == "/dev/shm":
                volume = self.volume(str(mount.get("name")))
                limit = _at(volume, "emptyDir").get("sizeLimit")
                return None if limit is None else amount(limit)
        return None

    def volume(self, name: str) -> Document:
        volumes = self.spec.get("volumes") or ()
        return next((each for each in volumes if each.get("name") == name), {})

    @property
    def environment(self) -> dict[str, str]:
        """Variables of Ray's container with a value in clear."""
        return in_clear(self.container)

    @property
    def variables(self) -> set[str]:
        """Names of all its variables, wherever their values come from."""
        return {str(each.get("name")) for each in self.container.get("env") or ()}

    @property
    def secrets(self) -> Iterator[str]:
        """Names of Secrets that must be there."""
        for container in self.containers:
            sources = [_at(each, "valueFrom") for each in container.get("env") or ()]
            references = [_at(each, "secretKeyRef") for each in sources]
            references += [_at(each, "secretRef") for each in container.get("envFrom") or ()]
            for reference in references:
                if reference and not reference.get("optional"):
                    yield str(reference.get("name"))
        for volume in self.spec.get("volumes") or ():
            secret = _at(volume, "secret")
            if secret and not secret.get("optional"):
                yield str(secret.get("secretName"))

    @property
    def labels(self) -> Mapping[str, str]:
        return _at(_at(self.template, "metadata"), "labels")


@dataclass(frozen=True)
class Workload:
    """One RayJob or RayCluster."""

    document: Document

    @property
    def kind(self) -> str:
        return str(self.document["kind"])

    @property
    def name(self) -> str:
        return str(_at(self.document, "metadata").get("name", "without a name"))

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def spec(self) -> Document:
        return _at(self.document, "spec")

    @property
    def is_job(self) -> bool:
        return self.kind == "RayJob"

    @property
    def cluster(self) -> Document:
        return _at(self.spec, "rayClusterSpec") if self.is_job else self.spec

    @property
    def cluster_place(self) -> str:
        return "spec.rayClusterSpec" if self.is_job else "spec"

    @cached_property
    def head(self) -> Pod:
        group = _at(self.cluster, "headGroupSpec")
        place = f"{self.cluster_place}.headGroupSpec"
        return Pod(place, _at(group, "template"), _at(group, "rayStartParams"), 1, True)

    @cached_property
    def workers(self) -> Sequence[Pod]:
        groups = self.cluster.get("workerGroupSpecs") or ()
        place = f"{self.cluster_place}.workerGroupSpecs"
        return [
            Pod(
                f"{place}[{index}]",
                _at(group, "template"),
                _at(group, "rayStartParams"),
                int(group.get("replicas") or group.get("minReplicas") or 0),
                False,
            )
            for index, group in enumerate(groups)
        ]

    @property
    def pods(self) -> Sequence[Pod]:
        return [self.head, *self.workers]

    # -------------------------------------------------------------------------------- the server

    @cached_property
    def entrypoint(self) -> str:
        if self.is_job:
            return str(self.spec.get("entrypoint", ""))
        return str(self.annotations.get(names.ENTRYPOINT_ANNOTATION, ""))

    @cached_property
    def words(self) -> list[str]:
        try:
            return shlex.split(self.entrypoint)
        except ValueError:  # a quotation without an end
            return self.entrypoint.split()

    def flag(self, *flags: str) -> str | None:
        """The value of a flag of the entrypoint, as `--flag value` or `--flag=value`; by any of its
        names, the last one counts."""
        found = None
        for word, following in zip(self.words, [*self.words[1:], ""], strict=True):
            flag, equals, value = word.partition("=")
            if flag in flags:
                found = value if equals else following
        return found

    @cached_property
    def topology(self) -> Topology | None:
        """None where the entrypoint serves nothing."""
        if "serve" not in self.words:
            return None
        sizes: dict[str, Any] = {}
        for field, flags in _SIZES.items():
            value = self.flag(*flags)
            if value is not None and value.isdecimal():
                sizes[field] = int(value)
        try:
            return Topology(**sizes)
        except ConfigError:
            return None

    @property
    def port(self) -> int:
        value = self.flag("--port") or ""
        return int(value) if value.isdecimal() else DEFAULT_PORT

    @property
    def port_name(self) -> str | None:
        """What the head's container calls that port."""
        ports = self.head.container.get("ports") or ()
        return next(
            (each.get("name") for each in ports if each.get("containerPort") == self.port), None
        )

    @property
    def drain_s(self) -> float:
        try:
            given = float(self.flag("--shutdown-timeout") or DEFAULT_DRAIN_S)
        except ValueError:
            return DEFAULT_DRAIN_S
        return given if 0 <= given < math.inf else DEFAULT_DRAIN_S  # `serve` takes no other

    @property
    def runtime_environment(self) -> Mapping[str, str]:
        """Variables of the job."""
        try:
            found = yaml.safe_load(str(self.spec.get("runtimeEnvYAML", "") or ""))
        except yaml.YAMLError:
            return {}
        return _at(found, "env_vars") if isinstance(found, Mapping) else {}

    @property
    def accepted(self) -> dict[str, str]:
        """Rules whose findings are meant, and why; nothing where no reason is given."""
        lines = str(self.annotations.get(names.ACCEPTED_ANNOTATION, "")).splitlines()
        pairs = (line.partition(":") for line in lines if line.strip())
        return {rule.strip(): reason.strip() for rule, _, reason in pairs}

    @property
    def labels(self) -> Mapping[str, str]:
        return _at(_at(self.document, "metadata"), "labels")

    @property
    def annotations(self) -> Mapping[str, str]:
        return _at(_at(self.document, "metadata"), "annotations")


@dataclass(frozen=True)
class Bundle:
    """All documents that are applied together."""

    documents: Sequence[Document]

    @cached_property
    def workloads(self) -> Sequence[Workload]:
        return [Workload(each) for each in self.documents if each.get("kind") in KINDS]

    def of_kind(self, kind: str) -> list[Document]:
        return [each for each in self.documents if each.get("kind") == kind]


def in_clear(container: Document) -> dict[str, str]:
    """Variables of a container with a value that everybody reads."""
    env = container.get("env") or ()
    return {str(e["name"]): str(e["value"]) for e in env if "name" in e and "value" in e}


def _at(value: object, name: str) -> Mapping[str, Any]:
    """A part that should be a mapping; empty where it is not there, or is something else."""
    found = value.get(name) if isinstance(value, Mapping) else None
    empty: dict[str, Any] = {}
    return found if isinstance(found, Mapping) else empty


def processes_of(topology: Topology, num_pods: int) -> tuple[int, int]:
    """vCPUs of the head and of each of so many worker pods, by the formula."""
    head = topology.num_api_servers + topology.num_coordinators
    engines = topology.num_engines * (1 + topology.workers_per_engine)
    return VCPUS_PER_PROCESS * head, VCPUS_PER_PROCESS * -(-engines // max(1, num_pods))
