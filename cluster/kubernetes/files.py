"""From the settings of a server to the text of its manifests."""

import re
import shlex
from collections.abc import Sequence

from cluster.config import ServeConfig
from cluster.dry_run import read_facts
from cluster.kubernetes import names, probes, render
from cluster.kubernetes.lint.run import RULES
from cluster.kubernetes.manifests import Deployment, Kind
from cluster.kubernetes.sizing import Overrides, size
from cluster.model_source import find
from cluster.ray_refusals import check_version
from engine.errors import ConfigError

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUEUE = re.compile(r"[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"\S+")
_VERSION = re.compile(r"\d+\.\d+\.\d+\S*")
_MOST_NAME_CHARS: dict[Kind, int] = {"rayjob": 47, "raycluster": 53}
"""The operator appends to them."""
_RAY_PORTS = (
    names.GCS_PORT,
    names.DASHBOARD_PORT,
    names.CLIENT_PORT,
    names.METRICS_PORT,
    probes.AGENT_PORT,
)


def rendered(
    config: ServeConfig,
    entrypoint: Sequence[str],
    *,
    kind: Kind,
    has_gpus: bool,
    name: str,
    image: str,
    ray_version: str | None,
    is_tls: bool,
    queue: str | None,
    cache_claim: str | None,
    head_vcpus: float | None,
    head_memory_bytes: int | None,
    worker_vcpus: float | None,
    worker_memory_bytes: int | None,
    accepted: Sequence[str],
    overlay: str | None,
) -> dict[str, str]:
    """The manifests, by file name; one bundle, without a name, where there is no overlay.

    Raises:
        ConfigError: the server cannot be, or its needs cannot be known.
    """
    _check_label("--name", name, _MOST_NAME_CHARS[kind])
    if overlay is not None:
        _check_label("--overlay", overlay, 63)
    _check("--queue", queue, _QUEUE, "the name of a LocalQueue")
    _check("--image", image, _IMAGE, "an image, with its tag")
    _check("--ray-version", ray_version, _VERSION, "a version like 2.60.0")
    if ray_version is not None:
        check_version(ray_version)
    _check_server(config, has_gpus=has_gpus)
    accepted_findings = tuple(_split(each) for each in accepted)
    folder = find(config.engine.model, cache_dir=config.environment.cache_dir)
    facts = None if folder is None else read_facts(folder, config)
    sizes = size(
        config,
        facts,
        has_gpus=has_gpus,
        overrides=Overrides(
            head_vcpus=head_vcpus,
            head_memory_bytes=head_memory_bytes,
            worker_vcpus=worker_vcpus,
            worker_memory_bytes=worker_memory_bytes,
        ),
    )
    deployment = Deployment(
        name=name,
        entrypoint=shlex.join(entrypoint),
        sizes=sizes,
        image=image,
        ray_version=ray_version or names.ray_version(),
        port=config.port,
        has_gpus=has_gpus,
        is_tls=is_tls,
        queue=queue,
        cache_claim=cache_claim,
        accepted_findings=accepted_findings,
    )
    if overlay is None:
        return {"": render.bundle(kind, deployment)}
    return render.tree(kind, overlay, deployment)


def _check_label(flag: str, name: str, most_chars: int) -> None:
    if not _LABEL.fullmatch(name) or len(name) > most_chars:
        raise ConfigError(
            f"{flag} takes at most {most_chars} small letters, digits and hyphens, a letter first,"
            f" not {name!r}"
        )


def _check(flag: str, value: str | None, pattern: re.Pattern[str], what: str) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(f"{flag} takes {what}, not {value!r}")


def _check_server(config: ServeConfig, *, has_gpus: bool) -> None:
    if config.port == 0 or config.port in _RAY_PORTS:
        whose = "anybody's choice" if config.port == 0 else "Ray's"
        raise ConfigError(f"--port {config.port} is {whose} in a pod: choose another, like 8000")
    if config.engine.device == ("cpu" if has_gpus else "cuda"):
        flag = "--gpu" if has_gpus else "no --gpu"
        raise ConfigError(f"--device {config.engine.device} and {flag} contradict each other")


def _split(accepted: str) -> tuple[str, str]:
    rule, colon, reason = (each.strip() for each in accepted.partition(":"))
    if not (colon and reason):
        raise ConfigError(f"--accept takes a rule and a reason, `cpu: a laptop`, not {accepted!r}")
    known = sorted(each.name for each in RULES)
    if rule not in known:
        raise ConfigError(f"--accept: no rule is called {rule!r}; there are {', '.join(known)}")
    return rule, reason
