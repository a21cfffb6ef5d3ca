"""The commands `raywire render k8s` and `raywire lint k8s`, and their flags. Light, as
`cluster/cli.py` is."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from cluster.kubernetes import names
from cluster.kubernetes.entrypoint import entrypoint
from cluster.option_groups import GroupedCommand, in_group
from cluster.option_types import HumanInt
from engine import __version__
from engine.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config import ServeConfig

F = TypeVar("F", bound=Callable[..., Any])

_pods = in_group("Kubernetes")
_OPTIONS = [
    _pods(
        "--kind",
        type=click.Choice(["rayjob", "raycluster"]),
        default="rayjob",
        show_default=True,
        help="A server that the operator runs, or a cluster to submit it to.",
    ),
    _pods("--gpu/--no-gpu", "has_gpus", default=False, help="A GPU for each worker."),
    _pods("--name", default="raywire", show_default=True, help="Of the RayJob or RayCluster."),
    _pods("--image", default=f"raywire:{__version__}", show_default=True, help="Of all pods."),
    _pods(
        "--ray-version",
        metavar="VERSION",
        help="Ray in that image; unless given, the one that is installed here.",
    ),
    _pods(
        "--tls/--no-tls",
        "is_tls",
        default=False,
        help=f"HTTPS in the pod, with tls.crt and tls.key of the Secret {names.TLS_SECRET}.",
    ),
    _pods(
        "--queue",
        metavar="NAME",
        help="A LocalQueue of Kueue, to wait in until there is room for all pods.",
    ),
    _pods(
        "--cache-claim", help="PersistentVolumeClaim for models and kernels, shared by the pods."
    ),
    _pods(
        "--head-cpu",
        "head_vcpus",
        type=click.FloatRange(min=0.1),
        help="vCPUs instead of the formula's.",
    ),
    _pods(
        "--head-memory",
        "head_memory_bytes",
        type=HumanInt(),
        help="Memory instead of the computed.",
    ),
    _pods(
        "--worker-cpu",
        "worker_vcpus",
        type=click.FloatRange(min=0.1),
        help="The same of each worker pod.",
    ),
    _pods(
        "--worker-memory",
        "worker_memory_bytes",
        type=HumanInt(),
        help="The same of each worker pod.",
    ),
    _pods(
        "--accept",
        "accepted",
        multiple=True,
        metavar="RULE:REASON",
        help="A finding of `raywire lint k8s` that is meant; may be given several times.",
    ),
    _pods(
        "-o",
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        help="A folder for a kustomize tree, instead of one bundle on standard output.",
    ),
    _pods("--overlay", help="Name of the overlay in that tree; unless given, --name's."),
]
"""Of `render k8s`, beside those of `serve`."""


@click.group()
def render() -> None:
    """Write what other systems deploy a server by."""


def make_render_k8s(
    serve: click.Command, serve_config: Callable[[str, dict[str, Any]], "ServeConfig"]
) -> click.Command:
    """The command, which takes all flags of `serve`.

    Args:
        serve: the command.
        serve_config: makes the settings of a server of a model's name and flags.
    """

    @click.command("k8s", cls=GroupedCommand)
    @click.argument("model")
    @_with_options
    def render_k8s(**flags: Any) -> None:
        """Write KubeRay manifests of a server of MODEL.

        Takes the flags of `raywire serve`. Cores follow from the formula, /dev/shm from the rings,
        memory from model and KV cache, grace periods from the drain. Engines share a worker pod by
        --data-parallel-size-local, one a pod unless given.

        \b
        Examples:
          raywire render k8s Qwen/Qwen3-8B --gpu | kubectl apply -f -
          raywire render k8s Qwen/Qwen3-8B -dp 4 -tp 2 --data-parallel-size-local 2 --gpu
          raywire render k8s demo --kv-cache-memory-bytes 1G -o deploy --overlay staging
        """
        own = {name: flags.pop(name) for name in own_names}
        if own["overlay"] is not None and own["output"] is None:
            raise click.UsageError("--overlay names a folder of a tree, which --output is for")
        words = entrypoint(serve, flags, is_tls=own["is_tls"])
        config = serve_config(flags.pop("model"), {**flags, "data_parallel_backend": "ray"})
        _render(config, words, **own)

    own_names = [str(param.name) for param in render_k8s.params if param.name != "model"]
    taken = {"model", *own_names}
    render_k8s.params += [param for param in serve.params if param.name not in taken]
    return render_k8s


def _with_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _render(
    config: "ServeConfig",
    words: Sequence[str],
    output: Path | None,
    overlay: str | None,
    **own: Any,
) -> None:
    """Write one bundle, or a tree where there is a folder for it."""
    # Only here: YAML, and what sizes a server.
    from cluster.kubernetes.files import rendered

    if output is None:
        click.echo(rendered(config, words, overlay=None, **own)[""], nl=False)
    else:
        overlay = overlay or own["name"]
        _write(output, rendered(config, words, overlay=overlay, **own))
        built = output / own["kind"] / overlay
        click.echo(f"`kubectl apply -k {built}` applies it", err=True)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        click.echo(path)


@click.group()
def lint() -> None:
    """Check what other systems deploy a server by."""


_KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")


class _Manifests(click.File):
    """A file of manifests; who names a folder learns how to build it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and Path(value).is_dir():
            if any(Path(value, name).is_file() for name in _KUSTOMIZATIONS):
                advice = f"`kubectl kustomize {value} | raywire lint k8s -` checks what it builds"
            else:
                advice = "name its files, or build one of its overlays with `kubectl kustomize`"
            self.fail(f"{value} is a folder: {advice}", param, ctx)
        return super().convert(value, param, ctx)


@lint.command("k8s")
@click.argument("files", nargs=-1, required=True, type=_Manifests(encoding="utf-8"))
@click.option("--json", "is_json", is_flag=True, help="JSON, for machines.")
def lint_k8s(files: Sequence[TextIO], is_json: bool) -> None:
    """Look for mistakes in RayJobs and RayClusters that serve a model.

    FILES are YAML, as many documents as are applied together; - is standard input. Each finding
    says why it is one and what to do. One that is meant is accepted by the annotation
    raywire.io/accepted-findings of the RayJob or RayCluster, with lines of `rule: reason`. Exit
    codes: 0 nothing, or nothing that is not accepted; 1 findings; 2 not YAML, or nothing to check.

    \b
    Examples:
      raywire lint k8s job.yaml network-policy.yaml
      kubectl kustomize k8s/rayjob/gpu | raywire lint k8s -
    """
    # Only here: YAML, and the rules.
    from cluster.kubernetes.lint.run import check_files, show, to_json

    findings = check_files(files)
    click.echo(json.dumps(to_json(findings), indent=2) if is_json else show(findings))
    if any(finding.accepted is None for finding in findings):
        sys.exit(1)
