"""Where a running server is: what people type, and the commands that ask one."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import cli
from cluster.server_url import server_url
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000/v1/", "http://localhost:8000/v1"),
        ("gpu-7", "http://gpu-7"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("http://gpu-7:8000/", "http://gpu-7:8000"),
        ("https://gateway/models", "https://gateway/models"),
    ],
)
def test_a_host_and_a_port_are_enough(given: str, url: str) -> None:
    """They are plain HTTP's, as people have it in mind."""
    assert server_url(given) == url


@pytest.mark.parametrize(
    "given",
    [
        *("", ":8000", "ftp://x", "http://", "http:/x", "http//x", "http+unix://x"),
        *("http://x:port", "http://[x", "x:0", "x:8000?key=1", "http://x/#there"),
    ],
)
def test_what_is_no_url_is_told_one(given: str) -> None:
    with pytest.raises(ConfigError, match=r"is no URL such as http://127\.0\.0\.1:8000$"):
        server_url(given)


@pytest.mark.parametrize(
    "words",
    [
        ["chat", "-q", "x", "--url"],
        ["complete", "-q", "x", "--url"],
        ["chaos", "--url"],
        ["bench", "serve", "--base-url"],
        ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--url"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_asks_a_server_takes_a_host_and_a_port(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none answers, the command says at which URL."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    result = CliRunner().invoke(cli, [*words, "127.0.0.1:1"])

    assert result.exit_code != 0
    assert "http://127.0.0.1:1" in result.output + str(result.exception)
