"""Rules about who gets in, and what the pods may do."""

import re
from collections.abc import Iterator, Mapping

from cluster.kubernetes import names
from cluster.kubernetes.lint.findings import Mistake, Rule
from cluster.kubernetes.lint.workload import Bundle, Document, Pod, Workload, in_clear

_RAY_PORTS = (names.GCS_PORT, names.DASHBOARD_PORT, names.CLIENT_PORT)
_ANYBODY = ("0.0.0.0/0", "::/0")
_ANY_NAMESPACE = {"kubernetes.io/metadata.name": "any"}
"""Labels of a namespace that nobody has thought of: its name alone."""
_SECRET_FLAGS = ("--api-key", "--admin-key", "--metrics-key", "--hf-token")
_SECRET_NAME = re.compile(
    r"(.*_)?(TOKEN|SECRET|PASSWORD|CREDENTIALS?|(API|ADMIN|METRICS|ACCESS|SECRET)_?KEY)",
    re.IGNORECASE,
)
"""All of a name: MAX_TOKENS and HF_TOKEN_PATH are none."""
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,})")


def _secrets(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    place = "spec.entrypoint" if workload.is_job else f"annotation {names.ENTRYPOINT_ANNOTATION}"
    for flag in _SECRET_FLAGS:
        if workload.flag(flag):
            yield Mistake(place, f"has a key in clear ({flag})")
    if _SECRET_VALUE.search(workload.entrypoint):
        yield Mistake(place, "has what looks like a token")
    for name, value in workload.runtime_environment.items():
        if _SECRET_NAME.fullmatch(name) and value:
            yield Mistake("spec.runtimeEnvYAML", f"has {name} in clear")
    for pod in workload.pods:
        for container in pod.containers:
            for name, value in in_clear(container).items():
                if _SECRET_NAME.fullmatch(name) and value:
                    whose = f"{pod.place} container {container.get('name')}"
                    yield Mistake(f"{whose} env", f"has {name} in clear")


def _dashboard(workload: Workload, bundle: Bundle) -> Iterator[Mistake]:
    mode = (workload.cluster.get("authOptions") or {}).get("mode")
    if mode != "token":
        yield Mistake(f"{workload.cluster_place}.authOptions", "does not ask for a token")
    for service in bundle.of_kind("Service"):
        spec = service.get("spec") or {}
        if spec.get("type") in ("NodePort", "LoadBalancer") and _leads_to_ray(spec, workload.head):
            yield Mistake(_title(service), f"{spec['type']} opens Ray's ports to the outside")
    service_type = (workload.cluster.get("headGroupSpec") or {}).get("serviceType")
    if service_type in ("NodePort", "LoadBalancer"):
        yield Mistake(
            f"{workload.head.place}.serviceType", f"{service_type} opens Ray's ports to the outside"
        )
    if (workload.cluster.get("headGroupSpec") or {}).get("enableIngress"):
        yield Mistake(f"{workload.head.place}.enableIngress", "opens the dashboard to the outside")


def _policy(workload: Workload, bundle: Bundle) -> Iterator[Mistake]:
    policies = bundle.of_kind("NetworkPolicy")
    for pod in workload.pods:
        if not any(_chooses(each, pod.labels) for each in policies):
            yield Mistake(pod.place, "no NetworkPolicy in these files chooses this pod")
    for policy in policies:
        opened = _open_ports(policy, workload.head)
        if opened and _chooses(policy, workload.head.labels):
            said = ", ".join(map(str, sorted(opened)))
            yield Mistake(_title(policy), f"lets anybody in to Ray's ports {said}")


def _service(workload: Workload, bundle: Bundle) -> Iterator[Mistake]:
    for service in bundle.of_kind("Service"):
        spec = service.get("spec") or {}
        selector = spec.get("selector") or {}
        if selector and any(_matches(selector, pod.labels) for pod in workload.workers):
            yield Mistake(f"{_title(service)} selector", "chooses worker pods, which serve no HTTP")
        is_ours = selector and _matches(selector, workload.head.labels)
        if is_ours and spec.get("publishNotReadyAddresses"):
            yield Mistake(_title(service), "leads to a head that loads or drains, too")
    ports = {
        port.get("targetPort", port.get("port"))
        for service in bundle.of_kind("Service")
        if _matches((service.get("spec") or {}).get("selector") or {"": ""}, workload.head.labels)
        for port in (service.get("spec") or {}).get("ports") or ()
    }
    if workload.topology is not None and bundle.of_kind("Service"):
        named = {
            port.get("name")
            for port in workload.head.container.get("ports") or ()
            if port.get("containerPort") == workload.port
        }
        if not ports & ({workload.port} | named):
            yield Mistake(workload.head.place, "no Service in these files leads to the HTTP port")


def _known_secrets(workload: Workload, bundle: Bundle) -> Iterator[Mistake]:
    made = {(each.get("metadata") or {}).get("name") for each in bundle.of_kind("Secret")}
    for pod in workload.pods:
        for name in sorted(set(pod.secrets) - made - {names.KEYS_SECRET, names.TLS_SECRET}):
            yield Mistake(pod.place, f"needs the Secret {name}, which is not in these files")


def _privileges(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    for pod in workload.pods:
        context = pod.spec.get("securityContext") or {}
        own = pod.container.get("securityContext") or {}
        if not (context.get("runAsNonRoot") or own.get("runAsNonRoot")):
            yield Mistake(f"{pod.place} securityContext", "may run as root")
        if own.get("allowPrivilegeEscalation") is not False:
            yield Mistake(f"{pod.place} securityContext", "may gain privileges")
        if "ALL" not in ((own.get("capabilities") or {}).get("drop") or ()):
            yield Mistake(f"{pod.place} securityContext", "keeps capabilities")
        if own.get("privileged") or context.get("runAsUser") == 0 or own.get("runAsUser") == 0:
            yield Mistake(f"{pod.place} securityContext", "is root of the node, or near it")
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(name):
                yield Mistake(f"{pod.place} {name}", "shares what belongs to the node")
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield Mistake(pod.place, "holds a token of the cluster's API, which it has no use for")


def _keys(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    if workload.topology is not None and not workload.flag("--api-key-file"):
        yield Mistake("entrypoint", "serves whoever reaches the port, without a key")


def _chooses(policy: Document, labels: Mapping[str, str]) -> bool:
    """Whether a NetworkPolicy says who comes in to pods with these labels."""
    spec = policy.get("spec") or {}
    selector = spec.get("podSelector")
    if selector is None or "Ingress" not in (spec.get("policyTypes") or ["Ingress"]):
        return False
    return _selects(selector, labels)


def _open_ports(policy: Document, head: Pod) -> set[int]:
    """Ports of Ray that a NetworkPolicy opens to the whole cluster or the world."""
    rules = (policy.get("spec") or {}).get("ingress") or ()
    return {port for rule in rules if _is_for_anybody(rule) for port in _ray_ports(rule, head)}


def _is_for_anybody(rule: Document) -> bool:
    return any(map(_is_anybody, rule.get("from") or [{"namespaceSelector": {}}]))


def _is_anybody(peer: Document) -> bool:
    """Whether a pod without labels, in a namespace that nobody knows, is meant."""
    if (peer.get("ipBlock") or {}).get("cidr") in _ANYBODY:
        return True
    namespaces, pods = peer.get("namespaceSelector"), peer.get("podSelector") or {}
    return namespaces is not None and _selects(namespaces, _ANY_NAMESPACE) and _selects(pods, {})


def _ray_ports(rule: Document, head: Pod) -> Iterator[int]:
    """Those among the ports of a rule; all, where it has no list of ports."""
    for given in rule.get("ports") or [{}]:
        first = _number(given.get("port"), head)
        last = given.get("endPort", first)
        for port in _RAY_PORTS:
            if "port" not in given or (first is not None and first <= port <= last):
                yield port


def _leads_to_ray(service: Document, head: Pod) -> bool:
    if not _matches(service.get("selector") or {"": ""}, head.labels):
        return False
    targets = (each.get("targetPort", each.get("port")) for each in service.get("ports") or ())
    return any(_number(target, head) in _RAY_PORTS for target in targets)


def _number(port: object, head: Pod) -> int | None:
    """A port by number, or by the name that the head's container gives it."""
    if isinstance(port, int):
        return port
    ports = head.container.get("ports") or ()
    named = {each.get("name"): each.get("containerPort") for each in ports}
    return named.get(port)


def _title(document: Document) -> str:
    return f"{document.get('kind')} {(document.get('metadata') or {}).get('name')}"


def _selects(selector: Document, labels: Mapping[str, str]) -> bool:
    """Whether a label selector chooses what has these; an empty one chooses everything."""
    return _matches(selector.get("matchLabels") or {}, labels) and all(
        _meets(each, labels) for each in selector.get("matchExpressions") or ()
    )


def _meets(requirement: Document, labels: Mapping[str, str]) -> bool:
    value = labels.get(str(requirement.get("key")))
    match requirement.get("operator"):
        case "In":
            return value in (requirement.get("values") or ())
        case "NotIn":
            return value not in (requirement.get("values") or ())
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case operator:
            raise ValueError(f"Kubernetes knows no operator {operator}")


def _matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.items())


RULES = (
    Rule(
        name="secrets",
        why="entrypoints and runtime environments are shown by Ray's dashboard and kept by its GCS;"
        " manifests are kept in repositories",
        fix="put it into a Secret, and read it from a file or by secretKeyRef",
        check=_secrets,
    ),
    Rule(
        name="dashboard",
        why="who reaches Ray's dashboard or GCS runs code on the cluster",
        fix="authOptions.mode: token, a ClusterIP service, no ingress",
        check=_dashboard,
    ),
    Rule(
        name="network-policy",
        why="every pod of the cluster reaches Ray's ports and the wires, and Ray's run code",
        fix="apply a NetworkPolicy as `raywire render k8s` writes it",
        check=_policy,
    ),
    Rule(
        name="service",
        why="requests would go where nobody answers, or not yet, or no longer",
        fix="select the head pod, and its HTTP port, only while it is ready",
        check=_service,
    ),
    Rule(
        name="secret-missing",
        why="the pod waits for it and does not start",
        fix="make it first, or apply it along",
        check=_known_secrets,
    ),
    Rule(
        name="privileges",
        why="models are other people's data; a fault in a parser should gain nothing",
        fix="runAsNonRoot, allowPrivilegeEscalation: false, drop ALL, no service account token, and"
        " nothing of the node",
        check=_privileges,
    ),
    Rule(
        name="keys",
        why="a NetworkPolicy says which pods come in, not who asks",
        fix="--api-key-file with a file from a Secret",
        check=_keys,
    ),
)
