"""The benchmark's report says what it measured, and `make bench` works."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.bench.machine import Load, ProcessMemory
from cluster.bench.percentile import percentile
from cluster.bench.wire import Trips
from tests.bench.__main__ import _command
from tests.bench.data_parallel import ScaleResult, Shape
from tests.bench.report import EngineResult, Report, write_into
from tests.bench.scale_report import FirstTokens, RouteCost, ScaleFigures, ScaleReport
from tests.bench.server_run import ServerResult, Streams
from tests.bench.steady_load import SteadyLoad


def engine(name: str, factor: float) -> EngineResult:
    row = {
        "batch": 8,
        "decode_step_ms": 10.0 * factor,
        "prefill_tokens_per_s": 1000.0 / factor,
        "output_tokens_per_s": 100.0,
    }
    server = ServerResult(
        ready_s=5 * factor,
        memory=[ProcessMemory("Worker", 100.0 * factor), ProcessMemory("API", 50.0 * factor)],
        streams=[Streams(8, 100.0, 5.0, 1.0, 2.0)],
    )
    return EngineResult(name, "1", [row], server, {"offline": Load(10.0, 0.9, 0.04)})


def report(*engines: EngineResult) -> str:
    return Report(
        "python -m tests.bench", "2030-01-02", "a machine", "demo", 128, 64, list(engines)
    ).markdown()


def test_a_ratio_is_ours_to_theirs_and_bold_where_ours_is_better() -> None:
    """Less time and more throughput are both better; equal is neither."""
    text = report(engine("raywire", 1.0), engine("vLLM", 2.0))

    assert "| decode step, ms, batch 8 | 10.0 | 20.0 | **0.50** |" in text
    assert "| prefill, tokens/s, batch 8 | 1000 | 500 | **2.00** |" in text
    assert "| output, tokens/s, batch 8 | 100 | 100 | 1.00 |" in text
    assert "| memory (PSS), MiB | 150 | 300 | **0.50** |" in text
    assert "Memory of vLLM by process, MiB: Worker 200, API 100." in text
    assert "raywire offline 90% / 4%" in text


def test_without_a_peer_there_are_no_ratios() -> None:
    """The figures stand alone where vLLM is not installed."""
    text = report(engine("raywire", 1.0))

    assert "| decode step, ms, batch 8 | 10.0 |" in text
    assert "ratio" not in text


def scale_report() -> str:
    def scale(ranks: int, num_tokens: int) -> ScaleResult:
        load = SteadyLoad(10.0, num_tokens, {rank: 8 + rank for rank in range(ranks)})
        cpu_s = {"API server": 0.4 * ranks, "worker": 0.8 * ranks}
        return ScaleResult(Shape(ranks, 1, 8, 10.0), 5.0, "total=5.0s", load, cpu_s, 0.25, 0.01)

    figures = ScaleFigures(
        [scale(1, 4000), scale(4, 14_000)],
        FirstTokens([1.0, 1.5], [2.0, 2.5], [3.0, 4.5]),
        [Trips("ipc", [100.0], [200.0]), Trips("TCP", [110.0], [300.0])],
        [RouteCost(1000, 20.0, 10.0)],
        None,
    )
    return ScaleReport("a command", "2030-01-02", "a machine", "1", 0.02, figures).markdown()


def test_efficiency_is_throughput_over_so_many_times_that_of_one_rank() -> None:
    """Beside it what the processors did, and CPU seconds by role over the tokens of the window."""
    text = scale_report()

    assert "| 4 | 1 | 1400 | **0.88** | 8 to 11 | 0.48 | 25% | 1% |" in text
    assert "| 4 | 1 | 0.114 | 0.229 | 0.343 |" in text
    assert "| **HTTP adds to `LLM`** | **1.00** | **2.00** |" in text
    assert "| TCP | 110 | 110 | 300 | 300 | 1.50 |" in text


def test_a_percentile_has_been_measured() -> None:
    """It is a sample that at least so many are no greater than."""
    samples = [30.0, 10.0, 20.0, 40.0]

    assert [percentile(samples, p) for p in (0, 50, 75, 76, 100)] == [10, 20, 30, 40, 40]


def test_new_figures_replace_the_old_ones_and_nothing_else(tmp_path: Path) -> None:
    """What people have written around the figures stays."""
    file = tmp_path / "performance.md"
    file.write_text(f"before\n\n{report(engine('raywire', 1.0))}\nafter\n")

    write_into(file, report(engine("raywire", 3.0)))

    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert text.count("decode step") == 1
    assert "| decode step, ms, batch 8 | 30.0 |" in text


def test_the_document_has_a_place_for_the_figures() -> None:
    """`make bench` can write into docs/performance.md as it is in the repository."""
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")

    for figures in (report(engine("raywire", 1.0)), scale_report()):
        first, *_, last = figures.splitlines()
        assert text.count(f"{first}\n") == text.count(f"{last}\n") == 1


def test_the_command_is_told_without_paths_of_the_machine() -> None:
    """Whoever reads the figures can take them again elsewhere."""
    words = ["--model", "/data/tiny", "--vllm-env", "A=/b/c", "--vllm-env", "D=0-1", "--logs", "x"]

    assert _command(words) == ("python -m tests.bench --model tiny --vllm-env A=c --vllm-env D=0-1")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_benchmark_runs_on_the_scripted_model(tmp_path: Path) -> None:
    """Every measurement of it, on a real LLM and real servers."""
    environ = {**os.environ, "RAYWIRE_CACHE_DIR": str(tmp_path)}
    options = "--model scripted --batches 1,2 --repeats 1 --prompt-tokens 16 --output-tokens 8"
    options += " --ranks 1,2 --streams-per-rank 2 --window 1 --rounds 20"

    result = subprocess.run(
        [sys.executable, "-m", "tests.bench", *options.split(), "--logs", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environ,
    )

    assert result.returncode == 0, result.stderr
    assert "RAYWIRE::Worker_DP0_PP0_TP0" in result.stdout
    offline = json.loads((tmp_path / "raywire-offline.json").read_text(encoding="utf-8"))
    assert [row["batch"] for row in offline["rows"]] == [1, 2]
    efficiency = re.findall(r"^\| 2 \| [12] \| \d+ \| \*\*(\S+)\*\* ", result.stdout, re.MULTILINE)
    assert len(efficiency) == 2
    assert "**HTTP adds to `LLM`**" in result.stdout
