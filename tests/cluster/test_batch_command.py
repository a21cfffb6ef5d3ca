"""`raywire run-batch`: what its flags come to. `tests/integration/test_run_batch` runs it."""

import resource
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cluster.batch import command
from cluster.batch.command import BatchSettings, NamedServer
from cluster.cli import cli
from cluster.config import EngineOptions, ServeConfig
from cluster.environment import Environment
from engine.errors import ConfigError


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[BatchSettings]:
    """The settings of each run, which does nothing."""
    settings: list[BatchSettings] = []

    def run(given: BatchSettings) -> int:
        settings.append(given)
        return 0

    monkeypatch.setattr(command, "run_batch", run)
    return settings


def invoke(*flags: str) -> None:
    """Raises what the command raises."""
    arguments = ["run-batch", "-i", "in", "-o", "out", *flags]
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


def test_the_server_has_the_flags_of_serve(given: list[BatchSettings]) -> None:
    """And a quieter log, unless one is asked for."""
    invoke("--model", "scripted", "-dp", "2", "--max-num-seqs", "8", "--max-model-len", "4K")
    invoke("--model", "scripted", "--log-level", "INFO")

    first, second = (each.server for each in given)
    assert isinstance(first, ServeConfig)
    assert isinstance(second, ServeConfig)
    assert first.engine.model == "scripted"
    assert (first.engine.data_parallel_size, first.engine.max_model_len) == (2, 4096)
    assert (first.log_level, second.log_level) == ("WARNING", "INFO")


def test_a_running_server_has_a_key(
    given: list[BatchSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the flag, or by the variable that OpenAI's clients read."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    invoke("--url", "http://x")
    invoke("--url", "http://x", "--api-key", "other")

    assert [each.server for each in given] == [
        NamedServer(url="http://x", api_key="secret"),
        NamedServer(url="http://x", api_key="other"),
    ]


@pytest.mark.parametrize("flags", [(), ("--model", "scripted", "--url", "http://x")])
def test_there_is_one_server(given: list[BatchSettings], flags: tuple[str, ...]) -> None:
    """One to start or one to use."""
    with pytest.raises(click.UsageError, match="give one of --model"):
        invoke(*flags)

    assert given == []


def test_a_running_server_takes_no_flags(given: list[BatchSettings]) -> None:
    """They would have no effect, and whoever gave them believes otherwise."""
    with pytest.raises(ConfigError, match="--max-num-seqs is for a server that is started"):
        invoke("--url", "http://x", "--max-num-seqs", "8")

    assert given == []


def test_engines_are_kept_busy() -> None:
    """As many requests under way as all of them take, and some that wait."""
    options = EngineOptions(model="m", data_parallel_size=2, max_num_seqs=100)
    server = ServeConfig(engine=options, environment=Environment())

    def concurrency(server: ServeConfig | NamedServer, asked: int | None = None) -> int:
        settings = BatchSettings(
            input_file="in", output_file="out", server=server, max_concurrency=asked
        )
        return settings.concurrency

    assert concurrency(server) == 250
    assert concurrency(server, asked=7) == 7
    assert concurrency(NamedServer(url="http://x", api_key=None)) == 256


@pytest.fixture
def few_files() -> Iterator[int]:
    """A soft limit of open files, which is put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield 512
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_there_are_files_for_all_connections(few_files: int) -> None:
    """A soft limit is raised as far as it has to be."""
    assert command._allowed_concurrency(few_files) == few_files
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files + 128


def test_a_hard_limit_bounds_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer are better than errors."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))

    assert command._allowed_concurrency(1000) == 172
    assert limits == [(300, 300)]


@pytest.mark.parametrize("name", ["in", "./in", "link"])
def test_the_input_is_not_written_to(tmp_path: Path, name: str) -> None:
    """By whatever name it goes."""
    source = tmp_path / "in"
    source.write_text("x\n")
    (tmp_path / "link").symlink_to(source)
    settings = BatchSettings(
        input_file=str(source),
        output_file=str(tmp_path / name),
        server=NamedServer(url="http://127.0.0.1:1", api_key=None),
        max_concurrency=None,
    )

    with pytest.raises(ConfigError, match="the same file"):
        command.run_batch(settings)

    assert source.read_text() == "x\n"
