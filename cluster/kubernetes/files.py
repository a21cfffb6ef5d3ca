"""From the settings of a server to the text of its manifests."""

import shlex
from collections.abc import Sequence

from cluster.config import ServeConfig
from cluster.dry_run import read_facts
from cluster.kubernetes import names, render
from cluster.kubernetes.manifests import Deployment, Kind
from cluster.kubernetes.sizing import Overrides, size
from cluster.model_source import find
from engine.errors import ConfigError


def rendered(
    config: ServeConfig,
    entrypoint: Sequence[str],
    *,
    kind: Kind,
    has_gpus: bool,
    name: str,
    image: str,
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
        ray_version=names.ray_version(),
        port=config.port,
        has_gpus=has_gpus,
        cache_claim=cache_claim,
        accepted_findings=tuple(_split(each) for each in accepted),
    )
    if overlay is None:
        return {"": render.bundle(kind, deployment)}
    return render.tree(kind, overlay, deployment)


def _split(accepted: str) -> tuple[str, str]:
    rule, colon, reason = accepted.partition(":")
    if not (colon and reason.strip()):
        raise ConfigError(f"--accept takes a rule and a reason, `cpu: a laptop`, not {accepted!r}")
    return rule.strip(), reason.strip()
