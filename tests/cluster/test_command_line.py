"""A command line made from settings says what the settings say."""

from typing import Any

import pytest

from cluster.cli import serve
from cluster.command_line import as_arguments
from cluster.hybrid import node_arguments


def parse(*arguments: str) -> dict[str, Any]:
    return dict(serve.make_context("serve", list(arguments)).params)


@pytest.mark.parametrize(
    "arguments",
    [
        ("m",),
        ("m", "-dp", "4", "--data-parallel-size-local", "2", "--data-parallel-hybrid-lb"),
        ("m", "--wire-port-range", "100-200", "--max-model-len", "auto", "--port", "0"),
        ("m", "--kv-cache-memory-bytes", "1.5G", "--no-enable-prefix-caching"),
        ("m", "--served-model-name", "a", "--served-model-name", "b c", "--dtype", "half"),
        ("./folder with spaces", "--startup-timeout", "7.5", "--scheduling-policy", "priority"),
    ],
)
def test_settings_survive_a_command_line(arguments: tuple[str, ...]) -> None:
    """Flags, lists, ranges and sizes; what is left at its default is not said."""
    settings = parse(*arguments)
    made = as_arguments(serve, settings)
    assert parse(*made) == settings
    assert len(made) <= len(arguments)


def test_a_node_server_runs_its_own_ranks_on_its_own_machine() -> None:
    """The flags that say where are replaced; the others stay."""
    base = as_arguments(serve, parse("m", "-dp", "4", "--data-parallel-size-local", "2"))
    settings = parse(*node_arguments(base, first_rank=2))
    assert settings["data_parallel_start_rank"] == 2
    assert settings["data_parallel_backend"] == "mp"
    assert settings["data_parallel_size"] == 4
    assert settings["data_parallel_size_local"] == 2
