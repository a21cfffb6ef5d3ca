"""The commands `raywire render k8s` and `raywire lint k8s`, and their flags. Light, as
`cluster/cli.py` is."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from cluster.command_line import as_arguments
from cluster.kubernetes import names
from cluster.option_groups import GroupedCommand, in_group
from cluster.option_types import HumanInt
from engine import __version__
from engine.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config import ServeConfig

_pods = in_group("Kubernetes")


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
    @_pods(
        "--kind",
        type=click.Choice(["rayjob", "raycluster"]),
        default="rayjob",
        show_default=True,
        help="A server that the operator runs, or a cluster to submit it to.",
    )
    @_pods("--gpu/--no-gpu", "has_gpus", default=False, help="A GPU for each worker.")
    @_pods("--name", default="raywire", show_default=True, help="Of the RayJob or RayCluster.")
    @_pods("--image", default=f"raywire:{__version__}", show_default=True, help="Of all pods.")
    @_pods(
        "--cache-claim", help="PersistentVolumeClaim for models and kernels, shared by the pods."
    )
    @_pods(
        "--head-cpu",
        "head_vcpus",
        type=click.FloatRange(min=0.1),
        help="vCPUs instead of the formula's.",
    )
    @_pods(
        "--head-memory",
        "head_memory_bytes",
        type=HumanInt(),
        help="Memory instead of the computed.",
    )
    @_pods(
        "--worker-cpu",
        "worker_vcpus",
        type=click.FloatRange(min=0.1),
        help="The same of each worker pod.",
    )
    @_pods(
        "--worker-memory",
        "worker_memory_bytes",
        type=HumanInt(),
        help="The same of each worker pod.",
    )
    @_pods(
        "--accept",
        "accepted",
        multiple=True,
        metavar="RULE:REASON",
        help="A finding of `raywire lint k8s` that is meant; may be given several times.",
    )
    @_pods(
        "-o",
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        help="A folder for a kustomize tree, instead of one bundle on standard output.",
    )
    @_pods("--overlay", help="Name of the overlay in that tree; unless given, --name's.")
    def render_k8s(**flags: Any) -> None:
        """Write KubeRay manifests of a server of MODEL.

        Takes the flags of `raywire serve`. Cores follow from the formula, /dev/shm from the rings,
        memory from model and KV cache, grace periods from the drain. Engines share a worker pod by
        --data-parallel-size-local, one a pod unless given.

        \b
        Examples:
          raywire render k8s demo | kubectl apply -f -
          raywire render k8s Qwen/Qwen3-8B -dp 4 -tp 2 --data-parallel-size-local 2 --gpu
          raywire render k8s demo --kind raycluster -o deploy --overlay staging
        """
        # Only here: YAML, and what sizes a server.
        from cluster.kubernetes.files import rendered

        own = {name: flags.pop(name) for name in own_names}
        output, overlay = own.pop("output"), own.pop("overlay") or own["name"]
        entrypoint = _entrypoint(serve, flags)
        config = serve_config(flags.pop("model"), {**flags, "data_parallel_backend": "ray"})
        if output is None:
            click.echo(rendered(config, entrypoint, overlay=None, **own)[""], nl=False)
        else:
            _write(output, rendered(config, entrypoint, overlay=overlay, **own))

    own_names = [str(param.name) for param in render_k8s.params if param.name != "model"]
    taken = {"model", *own_names}
    render_k8s.params += [param for param in serve.params if param.name not in taken]
    return render_k8s


@click.group()
def lint() -> None:
    """Check what other systems deploy a server by."""


class _Manifests(click.File):
    """A file of manifests; who names a folder learns how to build it."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if isinstance(value, str) and Path(value).is_dir():
            advice = f"`kubectl kustomize {value} | raywire lint k8s -` checks what it builds"
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


def _entrypoint(serve: click.Command, flags: dict[str, Any]) -> list[str]:
    """The command line of the server in its pod."""
    values = {**flags, "host": "0.0.0.0"}  # of the pod; a NetworkPolicy guards it
    _refuse_paths(serve, values)
    return ["raywire", "serve", *as_arguments(serve, _of_a_job(values))]


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        click.echo(path)


def _refuse_paths(serve: click.Command, values: dict[str, Any]) -> None:
    """Files of this machine are not in the pod."""
    for param in serve.params:
        if isinstance(param.type, click.Path | click.File) and values.get(param.name or ""):
            raise ConfigError(
                f"{param.opts[-1]} names a file of this machine, and pods have others: keys come"
                f" from the Secret {names.KEYS_SECRET}, TLS ends at the gateway, and anything else"
                " belongs into the image, to be named in the manifest's entrypoint"
            )


def _of_a_job(values: dict[str, Any]) -> dict[str, Any]:
    """The flags of the server in the pod: its port binds all of the pod's addresses, ranks go where
    the pods are, and keys come from the Secret's file."""
    if values.get("api_key"):
        raise ConfigError(
            "--api-key would stand in the manifest for all to read: put keys into the Secret"
            f" {names.KEYS_SECRET}, which the server reads as a file"
        )
    local = values.get("data_parallel_size_local") or 1
    return {
        **values,
        "data_parallel_size_local": local,
        "api_key_file": Path(names.KEYS_FOLDER) / names.API_KEYS,
        "metrics_key_file": Path(names.KEYS_FOLDER) / names.METRICS_KEY,
    }
