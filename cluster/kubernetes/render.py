"""Documents as files and text: one bundle, or a kustomize tree of a base and overlays. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cluster.kubernetes import names, surroundings
from cluster.kubernetes.manifests import Deployment, Document, Kind, custom_resource

HEADER = "# Made by `raywire render k8s`; change its flags rather than this file.\n"


def bundle(kind: Kind, deployment: Deployment) -> str:
    """Everything for `kubectl apply -f`, but for the Secret with the keys."""
    documents = [
        *surroundings.base(deployment.port, is_tls=deployment.is_tls).values(),
        custom_resource(kind, deployment),
    ]
    return HEADER + "".join(f"---\n{text(each)}" for each in documents)


def tree(kind: Kind, overlay: str, deployment: Deployment) -> dict[str, str]:
    """The same as a kustomize tree, by file name: the base, this overlay, and components that an
    overlay may take up."""
    base = surroundings.base(deployment.port, is_tls=deployment.is_tls)
    files: dict[str, Document] = {f"base/{name}": each for name, each in base.items()}
    files["base/kustomization.yaml"] = _kustomization(resources=list(base))
    files["base/secret-template.yaml"] = surroundings.secret_template()
    folder, resource = f"{kind}/{overlay}", f"{kind}.yaml"
    files[f"{folder}/{resource}"] = custom_resource(kind, deployment)
    files[f"{folder}/kustomization.yaml"] = _kustomization(resources=["../../base", resource])
    files["components/monitoring/pod-monitor.yaml"] = surroundings.pod_monitor(
        is_tls=deployment.is_tls
    )
    files["components/monitoring/kustomization.yaml"] = _component(resources=["pod-monitor.yaml"])
    files["components/kueue/kustomization.yaml"] = _component(patches=_kueue_patches())
    return {name: HEADER + text(each) for name, each in sorted(files.items())}


def text(document: Mapping[str, Any]) -> str:
    """One document, its fields in the order in which they were written."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, default_flow_style=False)


class _Dumper(yaml.SafeDumper):
    """Lists stand in from what they belong to, texts of several lines as they are, and nothing is
    an alias of anything."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    style = "|" if "\n" in data else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)


def _kustomization(resources: Sequence[str]) -> Document:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(resources),
    }


def _component(**parts: Any) -> Document:
    return {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", **parts}


def _kueue_patches() -> list[Document]:
    """Kueue lets what has its label wait until there is room for all of it. Set the queue's
    name."""
    label = names.QUEUE_LABEL.replace("/", "~1")  # as JSON pointers write it
    patch = f"- op: add\n  path: /metadata/labels/{label}\n  value: {names.APP}\n"
    return [
        {"target": {"group": "ray.io", "kind": kind}, "patch": patch}
        for kind in ("RayJob", "RayCluster")
    ]
