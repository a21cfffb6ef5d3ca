"""The command `raywire run-batch` and its flags. Light, as `cluster/cli.py` is."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cluster.option_groups import GroupedCommand, in_group
from engine.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config import ServeConfig

NOT_OF_A_BATCH = frozenset(
    {
        "model", "host", "port", "shutdown_timeout", "root_path", "disable_fastapi_docs",
        "api_key", "api_key_file", "metrics_key_file", "open_metrics", "admin_key_file",
        "prefix_cache_salt_per_key", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs",
        "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials",
        "data_parallel_hybrid_lb", "data_parallel_rank", "data_parallel_start_rank",
        "max_num_queued_reqs", "max_num_queued_tokens", "max_stored_responses", "send_timeout",
    }
)  # fmt: skip
"""What `serve` takes and a batch has no use for: it has one server, which only it knows, and whose
key only it has."""

_batch = in_group("Batch")


def make_run_batch(
    serve: click.Command, serve_config: Callable[[str, dict[str, Any]], "ServeConfig"]
) -> click.Command:
    """The command, which takes most of the flags of `serve`.

    Args:
        serve: the command.
        serve_config: makes the settings of a server of a model's name and flags.
    """

    @click.command("run-batch", cls=GroupedCommand)
    @_batch("-i", "--input-file", required=True, help="Requests, one a line; - is standard input.")
    @_batch("-o", "--output-file", required=True, help="Results, appended; - is standard output.")
    @_batch("--model", help="What to serve, as `raywire serve` has it.")
    @_batch("--url", help="A running server to use instead of starting one.")
    @_batch("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="For --url.")
    @_batch(
        "--max-concurrency",
        type=click.IntRange(min=1),
        help="Requests under way at most. Unless given, a quarter more than the engines take at"
        " once; 256 with --url.",
    )
    def run_batch(
        input_file: str,
        output_file: str,
        model: str | None,
        url: str | None,
        api_key: str | None,
        max_concurrency: int | None,
        **flags: Any,
    ) -> None:
        """Answer a file of requests into a file of results.

        Both have OpenAI's batch format: a line of JSON for each request, with custom_id, method,
        url (/v1/chat/completions or /v1/completions) and body; a line for each result, as they
        come. The server runs for as long as that takes and listens on the loopback device only.

        Results that OUTPUT has already are not asked for again: after a crash, run the same command
        again. Failed requests are results too; to repeat them, take their lines out.

        \b
        Examples:
          raywire run-batch -i in.jsonl -o out.jsonl --model demo
          raywire run-batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:8000

        Exit codes: 0 all succeeded, 3 all have a result and some failed, 1 the server failed and
        some have none, 2 a mistake in files or settings.
        """
        if (model is None) == (url is None):
            raise click.UsageError("give one of --model, to start a server, and --url, to use one")
        if url is not None and (given := _given(flags)):
            raise ConfigError(f"{given[0]} is for a server that is started, not for --url")
        # Only here: HTTP and event loops take time that --help does not need.
        from cluster.batch.command import BatchSettings, NamedServer
        from cluster.batch.command import run_batch as run

        server = NamedServer(url=url, api_key=api_key) if url else serve_config(model or "", flags)
        sys.exit(
            run(
                BatchSettings(
                    input_file=input_file,
                    output_file=output_file,
                    server=server,
                    max_concurrency=max_concurrency,
                )
            )
        )

    run_batch.params += [param for param in serve.params if param.name not in NOT_OF_A_BATCH]
    return run_batch


def _given(flags: dict[str, Any]) -> list[str]:
    """Those that were not left at their defaults, as the user would write them."""
    context = click.get_current_context()
    return [
        f"--{name.replace('_', '-')}"
        for name in flags
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
