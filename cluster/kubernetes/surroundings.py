"""What every server has around it, whatever its size: the documents of the kustomize base, and its
optional components. Pure."""

from cluster.kubernetes import names
from cluster.kubernetes.manifests import Document

OUR_PODS = {"matchLabels": {names.APP_LABEL: names.APP}}


def base(port: int, *, is_tls: bool = False) -> dict[str, Document]:
    """By file name."""
    return {
        "service-account.yaml": _service_account(),
        "service.yaml": _service(port, is_tls=is_tls),
        "network-policy.yaml": _network_policy(port),
        "pod-disruption-budget.yaml": _budget(),
    }


def secret_template() -> Document:
    """To be filled in and applied by hand: no key belongs into a file that is kept."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": names.KEYS_SECRET, "labels": {names.APP_LABEL: names.APP}},
        "type": "Opaque",
        "stringData": {names.API_KEYS: "", names.METRICS_KEY: "", names.HUB_TOKEN: ""},
    }


def pod_monitor(*, is_tls: bool = False) -> Document:
    """For Prometheus' operator, which has to know the kind."""
    server: Document = {
        "port": "http",
        "path": "/metrics",
        "bearerTokenSecret": {"name": names.KEYS_SECRET, "key": names.METRICS_KEY},
    }
    if is_tls:  # pods are asked by address, which no certificate names
        server |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": names.APP, "labels": {names.APP_LABEL: names.APP}},
        "spec": {
            "selector": OUR_PODS,
            "podMetricsEndpoints": [{"port": "metrics"}, server],
        },
    }


def _service_account() -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": names.APP, "labels": {names.APP_LABEL: names.APP}},
        "automountServiceAccountToken": False,
    }


def _service(port: int, *, is_tls: bool) -> Document:
    listed: Document = {"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"}
    if is_tls:  # for gateways, which would speak plainly
        listed["appProtocol"] = "https"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": names.APP, "labels": {names.APP_LABEL: names.APP}},
        "spec": {
            "selector": {names.APP_LABEL: names.APP, names.ROLE_LABEL: "head"},
            "ports": [listed],
        },
    }


def _network_policy(port: int) -> Document:
    """All that reaches our pods. Among them everything: Ray's ports and the wires' are chosen by
    the kernel."""
    anywhere: Document = {"namespaceSelector": {}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": names.APP, "labels": {names.APP_LABEL: names.APP}},
        "spec": {
            "podSelector": OUR_PODS,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": [{"podSelector": OUR_PODS}]},
                {
                    "from": [
                        {
                            **anywhere,
                            "podSelector": {"matchLabels": {names.GATEWAY_LABEL: "true"}},
                        }
                    ],
                    "ports": [{"port": port, "protocol": "TCP"}],
                },
                {
                    "from": [
                        {
                            **anywhere,
                            "podSelector": {
                                "matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}
                            },
                        }
                    ],
                    "ports": [{"port": names.DASHBOARD_PORT, "protocol": "TCP"}],
                },
                {
                    "from": [
                        {
                            **anywhere,
                            "podSelector": {
                                "matchLabels": {"app.kubernetes.io/name": "prometheus"}
                            },
                        }
                    ],
                    "ports": [
                        {"port": names.METRICS_PORT, "protocol": "TCP"},
                        {"port": port, "protocol": "TCP"},
                    ],
                },
            ],
            "egress": [
                {"to": [{"podSelector": OUR_PODS}]},
                # Names: who answers for them is called differently, and may be the node itself.
                {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
                # The hub, for models that are not in the cache yet.
                {"ports": [{"port": 443, "protocol": "TCP"}]},
            ],
        },
    }


def _budget() -> Document:
    """A pod that is evicted ends the server: nodes are drained by whoever ends it first."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": names.APP, "labels": {names.APP_LABEL: names.APP}},
        "spec": {"maxUnavailable": 0, "selector": OUR_PODS},
    }
