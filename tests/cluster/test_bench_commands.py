"""`raywire bench` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.cli import cli
from tests.helpers.canned_http import canned_server
from tests.helpers.server import ROOT, running_server


def bench(*words: str) -> Any:
    """The JSON of a command that must succeed."""
    result = subprocess.run(
        [sys.executable, "-m", "cluster", "bench", words[0], "--json", "-", *words[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def medians(results: Any) -> dict[str, float]:
    return {figure["name"]: figure["p50"] for figure in results["figures"]}


@pytest.mark.slow
def test_serve_measures_a_running_server(tmp_path: Path) -> None:
    """Random prompts for completions, and a dataset for a chat, on one server."""
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "hello", "output_tokens": 3}\n{"prompt": "you"}\n')
    with running_server("scripted") as server:
        to = ("--port", str(server.port), "--num-warmups", "1")
        lengths = ("--num-prompts", "6", "--input-len", "9", "--output-len", "5")
        plain = bench("serve", *to, *lengths, "--max-concurrency", "2", "--repeats", "2")
        chat = ("--endpoint", "/v1/chat/completions", "--dataset", str(dataset))
        chats = bench("serve", *to, *lengths, *chat, "--request-rate", "100")

    found = medians(plain)
    assert plain["counts"] == {"requests sent": 12, "errors": 0}
    assert plain["settings"]["model"] == "scripted"
    assert found["output tokens"] == pytest.approx(5 * found["requests"], rel=0.01)
    assert found["all tokens"] == pytest.approx(14 * found["requests"], rel=0.01)
    assert 0 < found["ttft, first token"] < found["e2el, to the last token"]
    assert chats["counts"] == {"requests sent": 6, "errors": 0}
    assert medians(chats)["output tokens"] == pytest.approx(4 * medians(chats)["requests"])


def test_without_a_server_there_is_one_line() -> None:
    """It names the address, and nothing else is said."""
    result = subprocess.run(
        [sys.executable, "-m", "cluster", "bench", "serve", "--base-url", "http://127.0.0.1:9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 2
    assert result.stderr.startswith("error: no answer from http://127.0.0.1:9/v1/models: ")
    assert result.stderr.count("\n") == 1


def test_a_server_that_is_not_ready_has_answered() -> None:
    """With what, and what that may mean."""
    reply = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
    with canned_server([reply]) as server:
        url = f"http://127.0.0.1:{server.port}"
        result = CliRunner().invoke(cli, ["bench", "serve", "--base-url", url])

    assert f"{url}/v1/models answers 503 Service Unavailable; it may still be loading" in (
        f"{result.output}{result.exception}"
    )


def test_results_that_cannot_be_written_are_not_measured() -> None:
    """A folder that is not there is told at once."""
    result = CliRunner().invoke(cli, ["bench", "ring", "--json", "/no/such/folder/x.json"])

    assert result.exit_code == 2
    assert "there is no folder /no/such/folder" in result.output


@pytest.mark.slow
def test_every_run_has_prompts_of_its_own_unless_told() -> None:
    """Those of an earlier run would come out of the prefix cache."""
    with running_server("scripted") as server:
        words = ("--port", str(server.port), "--num-prompts", "2", "--num-warmups", "0")
        seeds = [bench("serve", *words)["settings"]["seed"] for _ in range(2)]
        told = bench("serve", *words, "--seed", str(seeds[0]))

    assert seeds[0] != seeds[1]
    assert told["settings"]["seed"] == seeds[0]
    assert f"--seed {seeds[0]} makes these prompts again" in told["notes"]


@pytest.mark.slow
def test_latency_measures_the_llm_class() -> None:
    """Its steps are the rest of the time by the rest of the tokens."""
    words = "--model scripted --batch-size 2 --input-len 4 --output-len 5 --num-iters 3"
    found = bench("latency", *words.split(), "--num-iters-warmup", "1", "--repeats", "1")

    assert found["command"] == "latency"
    assert {figure["name"]: figure["count"] for figure in found["figures"]} == dict.fromkeys(
        ("prefill", "whole batch", "decode step", "output tokens"), 3
    )
    assert medians(found)["prefill"] < medians(found)["whole batch"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "figure"),
    [
        ("throughput --model scripted --num-prompts 8 --output-len 4", "output tokens"),
        ("startup --num-warmups 0 scripted -- --max-model-len 64", "to the first token"),
        ("wire --rounds 5", "call, TCP, encrypted"),
        ("ring --rounds 20 --readers 1", "step, 1 worker"),
        ("schedule --rounds 5 --running 1,4", "step, 4 running"),
    ],
    ids=lambda words: words.split()[0],
)
def test_the_others_measure_too(words: str, figure: str) -> None:
    """Each has its figures, in so many repeats."""
    command, *rest = words.split()
    found = bench(command, "--repeats", "2", *rest)

    (measured,) = [each for each in found["figures"] if each["name"] == figure]
    assert measured["min"] > 0
    assert len(measured["repeats"]) == 2
    assert found["command"] == command
