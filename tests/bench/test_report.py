"""The benchmark's report says what it measured, and `make bench` works."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.bench.machine import Load
from cluster.bench.percentile import percentile
from cluster.bench.wire import Trips
from tests.bench import curve_report, scale_report, summary
from tests.bench.curve_report import curves, exponent
from tests.bench.data_parallel import ScaleResult, Shape
from tests.bench.document import write_into
from tests.bench.engines import shown_command
from tests.bench.figures import (
    Axis,
    Curve,
    Figure,
    Recorder,
    Run,
    Store,
    read_store,
    write_store,
)
from tests.bench.limits import Limit, Machine, ModelWork
from tests.bench.rows import ROWS
from tests.bench.scale_report import FirstTokens, RouteCost, ScaleFigures, ScaleReport
from tests.bench.steady_load import SteadyLoad

RUN = Run("2030-01-02", "python -m tests.bench", "a machine", "abc1234", "9.9")


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table, by their first."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells}


def test_a_ratio_says_how_many_times_as_good_ours_is() -> None:
    """Less time and more throughput are both better. The median over the turns, with the least and
    the most; bold where ours is the better one."""
    text = summary.summary(
        {
            "decode-1": Figure([10.0, 10.0, 10.0], [20.0, 15.0, 30.0]),
            "decode-8": Figure([20.0], [10.0]),
            "http-1": Figure([30.0, 30.0], [10.0, 15.0]),
        }
    )

    found = rows(text)
    assert found["decode step, greedy, batch 1"][:3] == [
        "20.0 ms",
        "10.0 ms",
        "**2.00** (1.50–3.00)",
    ]
    assert found["decode step, greedy, batch 8"][2] == "0.50"
    assert found["HTTP: output, 1 stream"][2] == "**2.50** (2.00–3.00)"
    assert "raywire is ahead in 2." in text
    assert "**vLLM wins**: decode step, greedy, batch 8 (0.50)." in text


def test_the_readme_has_three_figures() -> None:
    """With the day and the machine; nothing where there is no peer to compare with."""
    figures = {
        "http-8": Figure([200.0, 200.0], [100.0, 80.0], run=RUN),
        "start-demo": Figure([5.0], [90.0], run=RUN),
        "memory-demo": Figure([1.0], run=RUN),
    }

    lines = summary.short(figures).splitlines()

    assert lines[1:] == [
        "2030-01-02, a machine:",
        "",
        "- 8 streams over HTTP: 200 tokens/s against 90.0 tokens/s, **2.2 times as good**",
        "- from the command to the first token: 5.00 s against 90.0 s, **18.0 times as good**",
        summary.SHORT_END,
    ]


def test_bars_are_met_or_missed() -> None:
    """As many times as the peer, or no more than so much, or no worse."""
    text = summary.summary(
        {
            "decode-1": Figure([10.0], [11.6]),
            "decode-8": Figure([10.0], [14.9]),
            "idle": Figure([0.01], [0.02]),
            "start-demo": Figure([13.0]),
            "between-1": Figure([5.0], [5.0]),
        }
    )

    bars = {label: cells[3] for label, cells in rows(text).items()}
    assert bars["decode step, greedy, batch 1"] == "≥ 1.15 ×: met"
    assert bars["decode step, greedy, batch 8"] == "≥ 1.5 ×: **missed**"
    assert bars["idle CPU, all processes"] == "≤ 0.02 cores: met"
    assert bars["command to first token, Gemma"] == "≤ 12 s: **missed**"
    assert bars["HTTP: between tokens, 99%, 1 stream"] == "no worse: met"
    missed = "decode step, greedy, batch 8; command to first token, Gemma"
    assert f"**Bars missed**: {missed}." in text


def test_what_was_taken_under_load_is_marked() -> None:
    """More than 5% of the cores for others, and there is a star and a sentence."""
    text = summary.summary({"decode-1": Figure([10.0], [20.0], others=0.06)})
    quiet = summary.summary({"decode-1": Figure([10.0], [20.0], others=0.04)})

    assert rows(text)["decode step, greedy, batch 1"][2] == "**2.00**\\*"
    assert "measure again" in text
    assert "\\*" not in quiet


def test_each_row_says_which_run_it_is_of() -> None:
    """Figures of different days stand in one table, with the commands below it."""
    later = replace(RUN, date="2030-02-03", command="python -m tests.bench --only idle")
    figures = {"decode-1": Figure([1.0], others=0.03, run=RUN), "idle": Figure([0.0], run=later)}

    text = summary.summary(figures)

    assert rows(text)["decode step, greedy, batch 1"][-1] == "a"
    assert rows(text)["idle CPU, all processes"][-1] == "b"
    first = f"- a: 2030-01-02, `{RUN.command}`; a machine; raywire abc1234, vLLM 9.9; others had"
    assert f"{first} at most 3% of the cores" in text
    assert "- b: 2030-02-03, `python -m tests.bench --only idle`" in text


def test_a_limit_says_which_share_of_it_is_reached() -> None:
    """Of a time the limit is the least, so a share of a half is twice the time."""
    text = summary.summary({"decode-1": Figure([40.0], limit=Limit(20.0, "memory"))})

    assert "20.0 ms, memory: 50%" in rows(text)["decode step, greedy, batch 1"]


def test_the_limit_is_what_takes_longest() -> None:
    """Few rows are bound by reading weights, many by arithmetic."""
    machine = Machine(bytes_per_s=1e9, flop_per_s=1e10)
    work = ModelWork(layer_params=40_000_000, head_params=10_000_000)

    memory, arithmetic = "memory at 1 GB/s", "arithmetic at 10 GFLOP/s"
    assert work.decode_ms(machine, 1) == Limit(100.0, memory)
    assert work.decode_ms(machine, 32) == Limit(320.0, arithmetic)
    assert work.prefill_ms(machine, 100) == Limit(802.0, arithmetic)
    # Two prompts of 100 tokens, then 10 steps of 100 ms for both.
    assert work.tokens_per_s(machine, 2, 100, 10) == Limit(20 / 2.604, memory)


def test_rows_have_keys_of_their_own() -> None:
    """Or one would take another's figures."""
    assert len({row.key for row in ROWS}) == len({row.label for row in ROWS}) == len(ROWS)


def test_a_turn_knows_what_others_did_in_it() -> None:
    """Longer turns count more."""
    recorder = Recorder()
    recorder.add("ours", {"decode-1": 10.0}, Load(wall_s=1.0, others=0.5))
    recorder.add("theirs", {"decode-1": 20.0}, Load(wall_s=3.0, others=0.1))

    figure = recorder.figures()["decode-1"]

    assert (figure.ours, figure.theirs) == ([10.0], [20.0])
    assert figure.others == pytest.approx(0.2)


def test_measuring_a_section_again_leaves_the_others(tmp_path: Path) -> None:
    """Its figures are replaced, in the file as in the table."""
    file = tmp_path / "performance.json"
    axis = Axis("x", [1, 2], [Curve("y", [1.0, 2.0])], run=RUN)
    first = Store().updated({"decode-1": Figure([1.0], run=RUN)}, {"running": axis})
    write_store(file, first.updated({"idle": Figure([0.0], [0.1])}, {}))

    write_store(file, read_store(file).updated({"decode-1": Figure([2.0])}, {}))

    found = read_store(file)
    assert found.figures == {"decode-1": Figure([2.0]), "idle": Figure([0.0], [0.1])}
    assert found.axes == {"running": axis}


def test_growth_is_that_of_the_far_end() -> None:
    """Flat, then linear, is linear; and a square is told."""
    places = [1, 10, 100, 1000, 10_000, 100_000]

    assert exponent(places, [5.0] * 6) == pytest.approx(0.0)
    assert exponent(places, [3.0 * place for place in places]) == pytest.approx(1.0)
    assert exponent(places, [20.0, 20.0, 20.0, 1e3, 1e4, 1e5]) == pytest.approx(1.0)
    assert exponent(places, [place**2 for place in places]) == pytest.approx(2.0)


def test_a_curve_that_grows_too_fast_is_named() -> None:
    """What should be flat may not be linear, and what should be linear no square."""
    places = [1, 10, 100, 1000]
    axis = Axis(
        "requests",
        places,
        [
            Curve("fine", [1.0, 10.0, 100.0, 1000.0]),
            Curve("square", [1.0, 100.0, 1e4, 1e6]),
            Curve("not flat", [1.0, 10.0, 100.0, 1000.0], allowed=0.0),
        ],
    )

    text = curves({"running": axis})

    assert "**Grows faster than it should**: square (requests); not flat (requests)." in text
    assert rows(text)["fine"][-2:] == ["n^1.00", "linear"]
    assert rows(text)["square"][-2:] == ["**n^2.00**", "linear"]


def scale_text() -> str:
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
    text = scale_text()

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
    file.write_text(f"before\n\n{summary.summary({'idle': Figure([1.0])})}\nafter\n")

    write_into(file, summary.summary({"idle": Figure([3.0])}))

    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert text.count("idle CPU") == 2  # its row, and among the bars that are missed
    assert "3.000 cores" in text


def test_the_document_has_a_place_for_the_figures() -> None:
    """`make bench` can write into docs/performance.md as it is in the repository."""
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")

    for part in (summary, curve_report, scale_report):
        assert text.count(f"{part.BEGIN}\n") == text.count(f"{part.END}\n") == 1


def test_the_command_is_told_without_paths_of_the_machine() -> None:
    """Whoever reads the figures can take them again elsewhere."""
    words = ["--model", "/data/tiny", "--vllm-env", "A=/b/c", "--vllm-env", "D=0-1", "--logs", "x"]

    shown = "python -m tests.bench --model tiny --vllm-env A=c --vllm-env D=0-1"
    assert shown_command(words) == shown


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_benchmark_runs_on_the_scripted_model(tmp_path: Path) -> None:
    """Real servers and a real engine, of ours only; what is measured is kept for the document."""
    environ = {**os.environ, "RAYWIRE_CACHE_DIR": str(tmp_path)}
    options = "--model scripted --only server,parts,dp --repeats 1 --prompt-tokens 16"
    options += " --output-tokens 8 --ranks 1,2 --streams-per-rank 2 --window 1 --rounds 20"

    result = subprocess.run(
        [sys.executable, "-m", "tests.bench", *options.split(), "--logs", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=450,
        env=environ,
    )

    assert result.returncode == 0, result.stderr
    assert "command to first token, Gemma" in result.stdout
    found = read_store(tmp_path / "performance.json").figures
    assert {"http-32", "memory-demo", "ring-1k", "schedule-256", "overhead-16"} <= found.keys()
    assert all(min(figure.ours) >= 0 for figure in found.values())
    efficiency = re.findall(r"^\| 2 \| [12] \| \d+ \| \*\*(\S+)\*\* ", result.stdout, re.MULTILINE)
    assert len(efficiency) == 2
    assert "**HTTP adds to `LLM`**" in result.stdout
