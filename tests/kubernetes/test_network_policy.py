"""The NetworkPolicy of every server: who reaches what, worked out as Kubernetes does from what the
document says."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.kubernetes import names

Labels = dict[str, str]

POLICY = Path(__file__).parents[2] / "k8s" / "base" / "network-policy.yaml"
SPEC = yaml.safe_load(POLICY.read_text())["spec"]
OURS = {names.APP_LABEL: names.APP}
GATEWAY = {names.GATEWAY_LABEL: "true"}
PROMETHEUS = {names.APP_LABEL: "prometheus"}
OPERATOR = {names.APP_LABEL: "kuberay-operator"}
HTTP = 8000
A_WIRE = 43210  # the kernel chooses them
AGENT = 52365
ALL = {HTTP, A_WIRE, AGENT, names.METRICS_PORT}
ALL |= {names.GCS_PORT, names.DASHBOARD_PORT, names.CLIENT_PORT}


def test_all_that_is_not_allowed_is_denied() -> None:
    """For our pods, in both directions."""
    assert SPEC["podSelector"] == {"matchLabels": OURS}
    assert set(SPEC["policyTypes"]) == {"Ingress", "Egress"}


@pytest.mark.parametrize(
    ("who", "is_here", "ports"),
    [
        (OURS, True, ALL),
        (GATEWAY, True, {HTTP}),
        (GATEWAY, False, {HTTP}),
        (PROMETHEUS, False, {HTTP, names.METRICS_PORT}),
        (OPERATOR, False, {names.DASHBOARD_PORT}),
        (OURS, False, set()),  # anybody may give pods of their own namespace our labels
        ({}, True, set()),
        ({}, False, set()),
        ({names.GATEWAY_LABEL: "false"}, True, set()),
    ],
    ids=[
        "our pods",
        "a gateway here",
        "a gateway elsewhere",
        "Prometheus",
        "the operator",
        "our labels elsewhere",
        "a stranger here",
        "a stranger elsewhere",
        "no gateway",
    ],
)
def test_who_comes_in(who: Labels, is_here: bool, ports: set[int]) -> None:
    """Our wires among our pods, HTTP from gateways, metrics to Prometheus, jobs of the operator."""
    assert {port for port in ALL if allows("ingress", "from", who, is_here, port)} == ports


@pytest.mark.parametrize(
    ("whom", "is_here", "port", "passes"),
    [
        (OURS, True, A_WIRE, True),
        ({}, False, 53, True),  # names: of kube-dns, or of a cache on the node
        ({}, False, 443, True),  # the hub
        ({}, False, 80, False),  # with what clouds tell their machines
        ({}, True, names.DASHBOARD_PORT, False),
    ],
)
def test_whom_our_pods_reach(whom: Labels, is_here: bool, port: int, passes: bool) -> None:
    assert allows("egress", "to", whom, is_here, port) is passes


def allows(direction: str, side: str, labels: Labels, is_here: bool, port: int) -> bool:
    """Whether a connection passes: some rule has the peer and the port."""
    return any(
        has_peer(rule.get(side), labels, is_here) and has_port(rule.get("ports"), port)
        for rule in SPEC[direction]
    )


def has_peer(peers: list[dict[str, Any]] | None, labels: Labels, is_here: bool) -> bool:
    if not peers:
        return True
    for peer in peers:
        assert peer.keys() <= {"podSelector", "namespaceSelector"}
        assert peer.get("namespaceSelector", {}) == {}  # of all namespaces
        wanted = peer.get("podSelector", {}).get("matchLabels", {})
        if (is_here or "namespaceSelector" in peer) and wanted.items() <= labels.items():
            return True
    return False


def has_port(ports: list[dict[str, Any]] | None, port: int) -> bool:
    return not ports or port in {each["port"] for each in ports}
