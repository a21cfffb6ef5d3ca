"""A command line made from settings says what the settings say."""

from pathlib import Path
from typing import Any

import pytest

from cluster.cli import _arguments_on_nodes, serve
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
        ("m", "--allowed-origins", '["https://a.org", "*"]', "--root-path", "/a b"),
        ("m", "--allowed-methods", "[]", "--allow-credentials", "--disable-fastapi-docs"),
        ("m", "--override-generation-config", '{"top_p": 0.9, "top_k": null}'),
        ("m", "--generation-config", "a folder"),
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
    settings = parse(*node_arguments(base, first_rank=2, shutdown_timeout_s=2.0))
    assert settings["data_parallel_start_rank"] == 2
    assert settings["data_parallel_backend"] == "mp"
    assert settings["data_parallel_size"] == 4
    assert settings["data_parallel_size_local"] == 2
    assert settings["shutdown_timeout"] == 2.0  # what Ray grants the job, not what was asked for


def test_a_node_server_finds_a_model_that_was_named_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its absolute path; in the API it is called as the user called it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "s.json").touch()
    for model, found in (
        ("./folder", f"{tmp_path}/folder"),
        ("scripted:s.json", f"scripted:{tmp_path}/s.json"),
        ("some/hub-id", "some/hub-id"),
        ("demo", "demo"),
    ):
        flags = parse(model, "-dp", "2", "--ray-address", "h:1")
        settings = parse(*_arguments_on_nodes(flags.pop("model"), flags))
        assert settings["model"] == found
        assert settings["served_model_name"] == (model,)
        assert settings["ray_address"] is None
