"""The command line: what it says, and how fast."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cluster import cli as cli_module
from cluster.cli import cli
from cluster.config import EngineOptions, ServeConfig
from cluster.environment import Environment
from cluster.option_types import HumanInt, PortRange
from engine.errors import EXIT_FAILED, ConfigError, ServerError


def run(*args: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def serve_config(*flags: str, model: str = "m") -> ServeConfig:
    """The settings that `raywire serve` would run with."""
    command = cli.commands["serve"]
    with command.make_context("serve", [model, *flags]) as context:
        given: dict[str, Any] = dict(context.params)
    return cli_module._serve_config(given.pop("model"), given, Environment())


HEAVY = (
    "asyncio",
    "numpy",
    "ray",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
    "zmq",
)


def test_help_is_light() -> None:
    """No HTTP, ZeroMQ, tokenizer or model is imported for it."""
    script = (
        "import sys, runpy; sys.argv = ['raywire', '--help']\n"
        "try: runpy.run_module('cluster', run_name='__main__')\n"
        f"finally: print('imported', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )

    assert result.stdout.splitlines()[-1] == "imported []"


def test_help_is_quick() -> None:
    """Half a second of processor time, which a neighbour on the same core may stretch, and far from
    what torch or Ray would take: wall time on a crowded machine proves nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.8


@pytest.mark.parametrize("args", [(), ("--help",), ("serve", "--help"), ("plan", "-h")])
def test_help_explains(args: tuple[str, ...]) -> None:
    """Help exits with 0 and names what there is."""
    result = run(*args)

    assert result.returncode == 0
    assert "Usage: raywire" in result.stdout
    assert not result.stderr


@pytest.mark.parametrize("group", [[], ["bench"], ["render"], ["lint"]], ids=" ".join)
def test_a_list_of_commands_says_all_of_each(group: list[str]) -> None:
    """On a terminal of 80 columns; click cuts what is longer."""
    text = CliRunner().invoke(cli, [*group, "--help"], env={"COLUMNS": "80"}).output

    commands = text.partition("Commands:\n")[2]
    assert commands
    assert "..." not in commands


def test_serve_help_is_grouped_and_has_examples() -> None:
    """Headings, examples and the environment, so that thirty flags can be read."""
    text = run("serve", "--help").stdout

    for heading in ("HTTP:", "Processes:", "Model:", "Scheduling:", "KV cache:", "Examples:"):
        assert heading in text
    assert "RAYWIRE_CACHE_DIR" in text


def test_version() -> None:
    """One line, without an installed distribution."""
    assert run("--version").stdout == "raywire 0.1.0\n"


def test_plan_shows_the_standard_deployments() -> None:
    """Without sizes: one GPU to eight replicas."""
    lines = run("plan").stdout.splitlines()

    assert len(lines) == 6
    assert lines[3].endswith("4        4        8            1     17         34")


def test_plan_of_sixteen_gpus() -> None:
    """-tp 8 -dp 2 is 21 processes, so 42 vCPUs; and serving it is not refused here."""
    assert run("plan", "-tp", "8", "-dp", "2").stdout.splitlines()[1].split()[-2:] == ["21", "42"]


def test_plan_for_machines() -> None:
    """--json gives the same numbers under names."""
    [row] = json.loads(run("plan", "-tp", "2", "-pp", "2", "--json").stdout)

    assert row["workers"] == 4
    assert row["processes"] == 6
    assert row["min_vcpus"] == 12


def test_a_dry_run_shows_ranks_wires_and_memory() -> None:
    """What `serve` would start, with the same flags; nothing is started."""
    text = run("plan", "scripted", "-dp", "2", "-tp", "2", "--api-server-count", "1").stdout

    assert "1 + 2 + 2 × 1 × 2 + 1 = 8 processes, 16 vCPUs" in text
    for words in (
        "RAYWIRE::Worker_DP1_PP0_TP1",
        "ROUTER < DEALER",
        "ipc",
        "262128",
        "memory asked",
    ):
        assert words in text


def test_a_dry_run_for_machines() -> None:
    """The same, complete, as JSON."""
    layout = json.loads(run("plan", "scripted", "-dp", "2", "--json").stdout)

    assert [rank["rank"] for rank in layout["ranks"]] == [0, 1]
    assert len(layout["processes"]) == 7
    assert layout["ranks"][0]["need"]["kv_tokens"] == 262128


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "--dtype", "half"), "error: --dtype matters only with a MODEL"),
        (("plan", "scripted", "--device", "cuda"), "error: 1 rank of 1 GPU cannot be placed"),
        (("serve",), "error: Missing argument 'MODEL'."),
        (("frob",), "error: No such command 'frob'."),
        (("plan", "-tp", "two"), "error: Invalid value for '-tp'"),
        (("plan", "-tp", "0"), "error: --tensor-parallel-size must be at least 1, not 0"),
        (("serve", "m", "--max-model-len", "long"), "error: Invalid value for '--max-model-len'"),
        (("serve", "m", "--port", "70000"), "error: --port must be from 0 to 65535"),
        (("serve", "m", "--block-size", "24"), "error: --block-size must be a power of two"),
        (("serve", "m", "--wire-port-range", "80"), "error: Invalid value for '--wire-port-range'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args: tuple[str, ...], message: str) -> None:
    """No usage screen, no traceback."""
    result = run(*args)

    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert not result.stdout


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5K", 1536), ("2G", 2 << 30), ("-7", -7)],
)
def test_numbers_may_be_written_as_people_do(text: str, number: int) -> None:
    """Small letters count in thousands, capitals in 1024s, as with vLLM."""
    assert HumanInt().convert(text, None, None) == number


@pytest.mark.parametrize("text", ["", "K", "eight", "1e400k", "auto", "nank", "٣x"])
def test_no_number_is_refused(text: str) -> None:
    """With an example of what is one."""
    with pytest.raises(click.BadParameter, match="is not an integer"):
        HumanInt().convert(text, None, None)


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_auto_length(text: str) -> None:
    """Both of vLLM's spellings."""
    assert serve_config("--max-model-len", text).engine.max_model_len == "auto"


def test_flags_become_settings() -> None:
    """vLLM's names, each where it belongs."""
    config = serve_config(
        *("-tp", "2", "-pp", "2", "--dtype", "half", "--max-num-batched-tokens", "4K"),
        *("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--no-async-scheduling"),
        *("--served-model-name", "a", "--served-model-name", "b", "--port", "0"),
        *("--scheduling-policy", "priority", "--shutdown-timeout", "3", "--log-level", "debug"),
    )

    assert config.engine.tensor_parallel_size == config.engine.pipeline_parallel_size == 2
    assert config.engine.dtype == "float16"
    assert config.engine.max_num_batched_tokens == 4096
    assert not config.engine.enable_prefix_caching
    assert not config.engine.enable_chunked_prefill
    assert config.engine.scheduler_config().async_scheduling is False
    assert serve_config().engine.scheduler_config().async_scheduling is None
    assert config.engine.scheduling_policy == "priority"
    assert config.served_model_name == ("a", "b")
    assert config.port == 0
    assert config.shutdown_timeout == 3
    assert config.log_level == "DEBUG"


def test_flags_of_data_parallelism_become_settings() -> None:
    """Where ranks go, and through which ports."""
    config = serve_config(
        *("--data-parallel-backend", "ray", "--ray-address", "10.0.0.1:6379"),
        *("--data-parallel-placement", "strict", "--data-parallel-size-local", "1"),
        *("--placement-timeout", "5", "--wire-port-range", "29500-29599"),
    )

    assert config.backend == "ray"
    assert config.ray_address == "10.0.0.1:6379"
    assert (config.strategy, config.data_parallel_size_local) == ("strict", 1)
    assert config.placement_timeout == 5
    assert config.wire_port_range == (29500, 29599)


@pytest.mark.parametrize("text", ["80", "80-", "-80", "a-b", "1-2-3", "", "1.5-2"])
def test_no_range_of_ports_is_refused(text: str) -> None:
    """With an example of what is one."""
    with pytest.raises(click.BadParameter, match="is not a range of ports"):
        PortRange().convert(text, None, None)


def test_defaults_are_those_of_the_settings() -> None:
    """The command line adds no defaults of its own."""
    assert serve_config() == ServeConfig(engine=EngineOptions(model="m"))


def test_a_missing_template_is_refused(tmp_path: Path) -> None:
    """Before a port is bound."""
    result = CliRunner().invoke(cli, ["serve", "m", "--chat-template", str(tmp_path / "none")])

    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_a_template_is_read_before_anything_starts(tmp_path: Path) -> None:
    """Its text is what the server gets; one that is no text is one clear line."""
    file = tmp_path / "chat.jinja"
    file.write_text("Grüße: {{ messages }}", encoding="utf-8")
    assert serve_config("--chat-template", str(file)).chat_template == "Grüße: {{ messages }}"

    file.write_text("Grüße", encoding="latin-1")
    with pytest.raises(ConfigError, match=r"chat\.jinja cannot be read: 'utf-8'"):
        serve_config("--chat-template", str(file))


def test_stored_responses_are_bounded() -> None:
    """0 is none; a number below that is a mistake."""
    assert serve_config().max_stored_responses == 1000
    assert serve_config("--max-stored-responses", "0").max_stored_responses == 0
    with pytest.raises(ConfigError, match="--max-stored-responses must be from 0"):
        serve_config("--max-stored-responses", "-1")


def test_web_sites_are_named_as_vllm_names_them() -> None:
    """JSON lists, or one text; unless given, no site may speak to the server."""
    assert serve_config().allowed_origins == ()
    config = serve_config(
        *("--allowed-origins", '["https://a.org"]', "--allow-credentials"),
        *("--allowed-methods", '["GET"]', "--allowed-headers", '["x-a"]', "--root-path", "/llm"),
        "--disable-fastapi-docs",
    )
    assert config.allowed_origins == ("https://a.org",)
    assert (config.allowed_methods, config.allowed_headers) == (("GET",), ("x-a",))
    assert config.allow_credentials
    assert config.disable_fastapi_docs
    assert config.root_path == "/llm"

    for one in ("*", '"*"', '["*"]'):
        assert serve_config("--allowed-origins", one).allowed_origins == ("*",)
    one_method = serve_config("--allowed-methods", "GET", "--allowed-headers", "x-a")
    assert (one_method.allowed_methods, one_method.allowed_headers) == (("GET",), ("x-a",))

    for bad in ('["https://a.org"', "[https://a.org]", "GET, POST", '{"a": 1}', "[1]", "7", ""):
        result = CliRunner().invoke(cli, ["serve", "m", "--allowed-origins", bad])
        assert result.exit_code == 2
        assert "is not a JSON list" in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--allowed-origins", '["https://a.org/"]'), "without a path"),
        (("--allowed-origins", '["a.org"]'), "scheme://host"),
        (("--allowed-origins", '["*"]', "--allow-credentials"), "name the origins"),
        (("--root-path", "llm"), "begin with a slash"),
        (("--root-path", "/llm/"), "not end with one"),
    ],
)
def test_mistakes_about_web_sites_end_the_start(flags: tuple[str, ...], words: str) -> None:
    """They would only show in somebody's browser."""
    with pytest.raises(ConfigError, match=words):
        serve_config(*flags)


def test_parsers_are_chosen_by_the_names_that_vllm_has() -> None:
    """Unless given, calls are read as the template shows them, and thoughts are not told apart."""
    plain = serve_config()
    assert (plain.tool_call_parser, plain.reasoning_parser) == ("auto", None)

    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    chosen = serve_config(*flags, "--reasoning-parser", "deepseek_r1")
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == ("hermes", "deepseek_r1")
    assert chosen.enable_auto_tool_choice
    assert not serve_config("--no-enable-auto-tool-choice").enable_auto_tool_choice

    result = CliRunner().invoke(cli, ["serve", "m", "--tool-call-parser", "hermit"])
    assert result.exit_code == 2
    assert "'hermes'" in result.output


def test_what_did_not_come_up_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first cause, as of any death, and its exit code; no traceback."""

    def serve_in_vain(**_: object) -> None:
        raise ServerError("engine core EngineCore_DP1 could not be started: died")

    monkeypatch.setattr(cli_module, "cli", serve_in_vain)
    with pytest.raises(SystemExit) as end:
        cli_module.run()

    assert end.value.code == EXIT_FAILED
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("ERROR", "first cause: engine core EngineCore_DP1 could not be started: died")
    ]
