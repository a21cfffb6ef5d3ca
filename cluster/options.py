"""The options of a server, with vLLM's names and meanings. Used by the commands in `cli`.

Each has its name and its default from a field of the settings.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from api.reasoning import FAMILIES as REASONING_PARSERS
from api.tools.select import FAMILIES as TOOL_CALL_PARSERS
from cluster.config import EngineOptions, ServeConfig
from cluster.environment import LOG_LEVELS
from cluster.option_groups import in_group
from cluster.option_types import (
    DTypeName,
    FamilyName,
    GenerationSource,
    HumanInt,
    JsonObject,
    JsonTexts,
    PortRange,
)

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

# Defaults live in the settings, once; `is_json` and the like have none there.
_DEFAULTS = {
    field.name: field.default
    for settings in (EngineOptions, ServeConfig)
    for field in dataclasses.fields(settings)
    if field.default is not dataclasses.MISSING
}


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


PARALLEL_OPTIONS = [
    _option("Processes", *names, type=int, help=help)
    for names, help in (
        (("-tp", "--tensor-parallel-size"), "Devices that share each layer."),
        (("-pp", "--pipeline-parallel-size"), "Stages of consecutive layers."),
        (("-dp", "--data-parallel-size"), "Independent engines, each with all of the model."),
        (("--api-server-count",), "API servers; unless given, as many as engines."),
    )
]


DATA_PARALLEL_OPTIONS = [
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
    _option(
        "Data parallelism",
        "--on-engine-death",
        type=click.Choice(["exit", "replace"]),
        help="When an engine dies or hangs: end the server, or start that engine anew while the"
        " others go on with its requests.",
    ),
]


def with_options(options: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
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
        help="""Web sites whose scripts may speak to this server: one, several as
        '["https://a.org", "https://b.org"]', or '*' for all. Unless given, none.""",
    ),
    _option(
        "HTTP",
        "--allowed-methods",
        type=JsonTexts(),
        help="""Of those scripts, as '["GET", "POST"]'. Unless given, all.""",
    ),
    _option(
        "HTTP",
        "--allowed-headers",
        type=JsonTexts(),
        help="""Of those scripts, as '["authorization"]'. Unless given, all.""",
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

_ACCESS_OPTIONS = [
    _option(
        "Access",
        "--api-key",
        multiple=True,
        help="Key that clients must have, for all but the probes. May be repeated. Others see it in"
        " the command line until it is hidden: better --api-key-file or RAYWIRE_API_KEY.",
    ),
    _option(
        "Access",
        "--api-key-file",
        type=_FILE,
        help="File of such keys, one a line; read again when it changes.",
    ),
    _option(
        "Access",
        "--metrics-key-file",
        type=_FILE,
        help="File of keys that open /metrics and nothing else.",
    ),
    _option(
        "Access",
        "--open-metrics/--no-open-metrics",
        help="Let everybody read /metrics, though there are keys.",
    ),
    _option(
        "Access",
        "--admin-key-file",
        type=_FILE,
        help="File of keys for the routes of an administrator, which are not there without one.",
    ),
    _option(
        "Access",
        "--prefix-cache-salt-per-key/--no-prefix-cache-salt-per-key",
        help="Let requests share cached prefixes only with those of the same key.",
    ),
    _option("Access", "--ssl-certfile", type=_FILE, help="Certificate of the server (PEM): HTTPS."),
    _option(
        "Access", "--ssl-keyfile", type=_FILE, help="Its key, where that is in a file of its own."
    ),
    _option("Access", "--ssl-ca-certs", type=_FILE, help="Who signs certificates of clients."),
    _option(
        "Access",
        "--ssl-cert-reqs",
        type=click.IntRange(0, 2),
        help="Whether clients show one: 0 no, 1 if they have one, 2 yes.",
    ),
]

SERVE_OPTIONS = [
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
        "--max-n",
        type=int,
        help="Choices that a request may ask for: n, best_of. `raywire limits` has other bounds.",
    ),
    _option(
        "HTTP",
        "--max-stored-responses",
        type=int,
        help="Responses of /v1/responses to keep in memory, for GET and previous_response_id.",
    ),
    _option(
        "HTTP",
        "--max-num-queued-reqs",
        type=HumanInt(),
        help="Requests in flight at most, waiting or running; more get 503 at once. Unless given,"
        " 1024 more than --max-num-seqs of all engines. Each API server has its share.",
    ),
    _option(
        "HTTP",
        "--max-num-queued-tokens",
        type=HumanInt(),
        help="Prompt tokens that may wait for their prefill; while there are as many, requests get"
        " 503. Unless given, no limit.",
    ),
    _option(
        "HTTP",
        "--chat-template",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Jinja file used instead of the model's own template.",
    ),
    _option(
        "HTTP",
        "--generation-config",
        type=GenerationSource(),
        help="Where defaults of sampling are read: auto is the model's generation_config.json, vllm"
        " nowhere; else a folder with such a file.",
    ),
    _option(
        "HTTP",
        "--override-generation-config",
        type=JsonObject(),
        help="Defaults of sampling that come before those, as '{\"temperature\": 0.7}'."
        " max_new_tokens in it is a limit.",
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
        "--send-timeout",
        type=float,
        help="Seconds after which a client that does not read its answer is cut off.",
    ),
    _option(
        "HTTP",
        "--shutdown-timeout",
        type=float,
        help="Seconds that running requests have after the first signal.",
    ),
    *_WEB_OPTIONS,
    *_ACCESS_OPTIONS,
]

ENGINE_OPTIONS = [
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
        help="Weights of a bfloat16 model as 8-bit integers: half the memory, and faster decodes."
        " On CPU.",
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
        "--enforce-eager/--no-enforce-eager",
        help="On a GPU, launch each kernel of a decode by itself, instead of CUDA graphs.",
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
