"""The command line of the server in its pod, from the flags of `raywire serve` that an operator
gives: without what the pod or the operator decides, and without what stays on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cluster.command_line import as_arguments
from cluster.kubernetes import names
from engine.errors import ConfigError

_EVERYWHERE = "0.0.0.0"
"""All addresses of the pod; a NetworkPolicy guards it."""

_OF_A_NODE = (
    "ray_address",
    "data_parallel_hybrid_lb",
    "data_parallel_start_rank",
    "data_parallel_rank",
)
"""Flags of a server that is started node by node, or beside its cluster."""


def entrypoint(serve: click.Command, flags: dict[str, Any], *, is_tls: bool) -> list[str]:
    """Return the words of the command.

    Args:
        serve: the command.
        flags: its values by parameter name, with the model.
        is_tls: whether the server speaks HTTPS itself.

    Raises:
        ConfigError: a flag means something that a pod has not, or nobody should read.
    """
    if flags.get("api_key"):
        raise ConfigError(
            "--api-key would stand in the manifest for all to read: put keys into the Secret"
            f" {names.KEYS_SECRET}, which the server reads as a file"
        )
    for flag in _of_this_machine(serve, flags):
        raise ConfigError(
            f"{flag} names a file of this machine, and pods have others: keys come"
            f" from the Secret {names.KEYS_SECRET}, a certificate by --tls, and anything else"
            " belongs into the image, to be named in the manifest's entrypoint"
        )
    for flag in _of_nobody_here(serve, flags):
        raise ConfigError(
            f"{flag} is not for pods: the server runs in the head pod, at all of its addresses, and"
            " its engines as actors where the operator makes worker pods; leave it out"
        )
    return ["raywire", "serve", *as_arguments(serve, _of_the_pod(flags, is_tls=is_tls))]


def _of_this_machine(serve: click.Command, flags: dict[str, Any]) -> Iterator[str]:
    for param in serve.params:
        is_path = isinstance(param.type, click.Path | click.File)
        if is_path and flags.get(param.name or ""):
            yield param.opts[-1]
    if flags.get("generation_config") not in (None, "auto", "vllm"):
        yield "--generation-config"
    model = Path(str(flags["model"]))
    if (not model.is_absolute() and model.exists()) or str(model).startswith("~"):
        yield f"MODEL {model}"


def _of_nobody_here(serve: click.Command, flags: dict[str, Any]) -> Iterator[str]:
    given = {name for name in _OF_A_NODE if flags.get(name) not in (None, False, "")}
    if flags.get("data_parallel_rank") is not None:  # 0 is one
        given.add("data_parallel_rank")
    if flags.get("data_parallel_backend") == "mp":
        given.add("data_parallel_backend")
    if flags.get("host") not in (None, _EVERYWHERE):
        given.add("host")
    yield from (param.opts[-1] for param in serve.params if param.name in given)


def _of_the_pod(flags: dict[str, Any], *, is_tls: bool) -> dict[str, Any]:
    """With keys and certificate from files of Secrets, and engines that share pods as they are
    sized."""
    keys, tls = Path(names.KEYS_FOLDER), Path(names.TLS_FOLDER)
    pair = {"ssl_certfile": tls / names.CERTIFICATE, "ssl_keyfile": tls / names.PRIVATE_KEY}
    return {
        **flags,
        **(pair if is_tls else {}),
        "host": _EVERYWHERE,
        "data_parallel_size_local": flags.get("data_parallel_size_local") or 1,
        "api_key_file": keys / names.API_KEYS,
        "metrics_key_file": keys / names.METRICS_KEY,
    }
