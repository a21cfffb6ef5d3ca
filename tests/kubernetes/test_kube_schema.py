"""The checks of manifests can fail: one broken document for each of their rules."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.kube_schema import problems

Document = dict[str, Any]


def pod_template() -> Document:
    container = {
        "name": "ray",
        "image": "raywire:1",
        "ports": [{"containerPort": 6379, "name": "gcs"}],
        "resources": {"limits": {"cpu": 2, "memory": "4Gi"}},
    }
    return {"spec": {"containers": [container]}}


def ray_cluster() -> Document:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "raywire"},
        "spec": {
            "rayVersion": "2.60.0",
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": pod_template()},
            "workerGroupSpecs": [
                {"groupName": "engines", "rayStartParams": {}, "template": pod_template()}
            ],
        },
    }


def ray_job() -> Document:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "raywire"},
        "spec": {
            "entrypoint": "python -m cluster serve demo",
            "rayClusterSpec": ray_cluster()["spec"],
        },
    }


def service() -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "raywire"},
        "spec": {"selector": {"app": "raywire"}, "ports": [{"port": 8000, "name": "http"}]},
    }


@pytest.mark.parametrize("make", [ray_cluster, ray_job, service])
def test_good_documents_pass(make: Callable[[], Document]) -> None:
    assert problems(make()) == []


def head(document: Document) -> Document:
    spec = document["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    return cluster["headGroupSpec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def misspell(document: Document) -> None:
    document["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParam"] = {}


def misspell_deep(document: Document) -> None:
    head(document)["livenesProbe"] = {}


def leave_out_the_template(document: Document) -> None:
    del document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]


def say_a_word_for_a_number(document: Document) -> None:
    document["spec"]["backoffLimit"] = "three"


def ask_for_no_quantity(document: Document) -> None:
    head(document)["resources"]["limits"]["memory"] = "four gigabytes"


def take_a_port_twice(document: Document) -> None:
    head(document)["ports"] *= 2


def choose_an_unknown_mode(document: Document) -> None:
    document["spec"]["rayClusterSpec"]["authOptions"] = {"mode": "password"}


def be_managed_by_another(document: Document) -> None:
    document["spec"]["managedBy"] = "somebody"


def delete_by_no_rule(document: Document) -> None:
    document["spec"]["deletionStrategy"] = {}


def name_two_containers_alike(document: Document) -> None:
    pod = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    pod["containers"] *= 2


def restart_for_a_code_twice(document: Document) -> None:
    codes = {"operator": "In", "values": [1, 1]}
    head(document)["restartPolicyRules"] = [{"action": "Restart", "exitCodes": codes}]


def take_a_long_name(document: Document) -> None:
    document["metadata"]["name"] = "r" * 48


BROKEN: list[tuple[Callable[[Document], None], str]] = [
    (misspell, "rayStartParam"),
    (misspell_deep, "livenesProbe"),
    (leave_out_the_template, "'template' is a required property"),
    (say_a_word_for_a_number, "backoffLimit"),
    (ask_for_no_quantity, "memory"),
    (take_a_port_twice, "two items with containerPort, protocol 6379, TCP"),
    (choose_an_unknown_mode, "authOptions.mode"),
    (be_managed_by_another, "managedBy field value must be either"),
    (delete_by_no_rule, "deletionStrategy requires either"),
    (name_two_containers_alike, "two items with name ray"),
    (restart_for_a_code_twice, "has non-unique elements"),
    (take_a_long_name, "no name of 47 characters"),
]


@pytest.mark.parametrize(("break_it", "what"), BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_each_rule_can_fail(break_it: Callable[[Document], None], what: str) -> None:
    document = copy.deepcopy(ray_job())
    break_it(document)

    assert what in "\n".join(problems(document))


def test_a_core_kind_is_checked_strictly_too() -> None:
    document = service()
    document["spec"]["port"] = 8000

    assert "port" in "\n".join(problems(document))


def test_null_counts_as_not_there() -> None:
    """Where a field may be missing; one that is required is missing then."""
    document = ray_job()
    document["spec"]["ttlSecondsAfterFinished"] = None
    assert problems(document) == []
    document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"] = None
    assert "'template' is a required property" in "\n".join(problems(document))


def test_what_a_default_fills_is_not_missing() -> None:
    """`maxReplicas` is required, and has one."""
    document = ray_cluster()
    document["spec"]["workerGroupSpecs"][0]["replicas"] = 2

    assert problems(document) == []
