"""What `raywire bench` says of its figures."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click.testing
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.cli import bench
from cluster.bench.machine import Load, Tree, arithmetic, busy_s, describe, usage, watch
from cluster.bench.percentile import percentile
from cluster.bench.results import Measured, Output, Results, emit

SAMPLES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50)


def results(others: float = 0.01) -> Results:
    return Results(
        "serve",
        {"seed": 0},
        [
            Measured("ttft", "ms", [[10.0, 20.0, 30.0], [20.0, 40.0, 60.0]]),
            Measured("output tokens", "1/s", [[100.0], [150.0]]),
            Measured("nothing", "ms", [[], []]),
        ],
        Load(others=others),
        counts={"errors": 1},
        notes=["first error: HTTP 400"],
    )


@given(SAMPLES, st.floats(0, 100))
def test_a_percentile_is_a_sample_that_so_many_do_not_exceed(
    samples: list[float], p: float
) -> None:
    """Nothing in between, and no smaller one would do."""
    found = percentile(samples, p)

    assert found in samples
    assert sum(sample <= found for sample in samples) >= len(samples) * p / 100 - 1e-9
    assert sum(sample < found for sample in samples) <= len(samples) * p / 100 + 1e-9


def test_spread_is_how_far_the_repeats_lie_apart() -> None:
    """As a share of the middle one; one repeat has none."""
    assert Measured("a", "s", [[1.0], [2.0], [3.0]]).spread == pytest.approx(1.0)
    assert Measured("a", "s", [[5.0, 9.0], [9.0, 5.0]]).spread == 0
    assert Measured("a", "s", [[5.0, 9.0]]).spread is None
    assert Measured("a", "s", [[0.0], [0.0]]).spread is None


def test_the_table_has_percentiles_where_there_are_samples() -> None:
    """One figure a repeat has a middle, no tail; what has no samples is left out."""
    lines = results().text([50, 90]).splitlines()

    assert lines[0].split() == ["p50", "p90", "spread"]
    assert lines[1].split() == ["ttft", "ms", "20.0", "60.0", "67%"]
    assert lines[2].split() == ["output", "tokens", "1/s", "125", "40%"]
    assert lines[3].split() == ["errors", "1"]
    assert "nothing" not in "".join(lines)
    assert lines[-2:] == ["first error: HTTP 400", "others had 1% of this machine's cores"]


def test_what_was_measured_under_load_is_marked() -> None:
    """Each figure of it, and the JSON says it too."""
    spoiled = results(others=0.3)

    assert "20.0*" in spoiled.text([50])
    assert "* others had 30%" in spoiled.text([50])
    assert spoiled.to_json([50])["load"] == {"others": 0.3, "is_spoiled": True}


def test_the_json_has_a_schema(tmp_path: Path) -> None:
    """Readers may rely on these names."""
    file = tmp_path / "out.json"

    emit(results(), Output(json_file=str(file), percentiles=[50, 99.9]))

    found = json.loads(file.read_text())
    assert found.keys() == {
        "schema", "command", "date", "raywire", "machine", "settings", "load", "counts",
        "figures", "notes",
    }  # fmt: skip
    assert found["schema"] == 1
    first, second = found["figures"]
    assert first == {
        "name": "ttft",
        "unit": "ms",
        "count": 6,
        "mean": 30.0,
        "min": 10.0,
        "max": 60.0,
        "p50": 20.0,
        "p99.9": 60.0,
        "spread": pytest.approx(2 / 3),
        "repeats": [{"p50": 20.0, "p99.9": 30.0}, {"p50": 40.0, "p99.9": 60.0}],
    }
    assert second["repeats"] == [{"p50": 100.0, "p99.9": 100.0}, {"p50": 150.0, "p99.9": 150.0}]


def test_json_may_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone, so that it can be piped."""
    emit(results(), Output(json_file="-"))

    assert json.loads(capsys.readouterr().out)["command"] == "serve"


def test_results_may_be_saved_by_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--save-result` of vLLM's benchmark does, in the working folder."""
    monkeypatch.chdir(tmp_path)

    emit(results(), Output(is_saved=True))

    (file,) = tmp_path.glob("raywire-bench-serve-*.json")
    assert json.loads(file.read_text())["command"] == "serve"


@pytest.mark.parametrize(
    "words",
    [
        "schedule --running 1,0",
        "ring --readers a",
        "wire --rounds 0",
        "serve --metric-percentiles 50,101",
        "latency --num-iters -1",
    ],
)
def test_numbers_that_mean_nothing_are_refused(words: str) -> None:
    """Before anything is measured."""
    assert click.testing.CliRunner().invoke(bench, words.split()).exit_code == 2


def test_a_bystander_counts_as_others() -> None:
    """A process of ours that should do nothing, and does: its work is no work of ours."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        tree = Tree(busy.pid)
        with watch(tree) as load, watch() as whole:
            before = tree.cpu_s()
            while tree.cpu_s() - before < 0.1:
                pass
    finally:
        busy.kill()
        busy.wait()

    capacity = load.wall_s * (os.cpu_count() or 1)
    assert (whole.ours - load.ours) * capacity >= 0.09
    assert load.others > whole.others


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 fma", "AVX2"),
        ("avx2 avx512f avx512_bf16", "AVX-512 BF16"),
        ("avx512f avx512_bf16 amx_tile", "AMX"),
        ("fp asimd", "NEON"),
        ("fpu", None),
    ],
)
def test_a_processor_is_known_by_its_widest_arithmetic(flags: str, expected: str | None) -> None:
    """Two of one name may differ in it, and so in every figure."""
    assert arithmetic(flags) == expected


def test_the_machine_is_told_without_help() -> None:
    """From /proc: this process is one of its own tree, uses memory and time, and is no other."""
    with watch() as load:
        before, began = busy_s(), time.process_time()
        while busy_s() - before < 0.03 or time.process_time() - began < 0.03:
            pass
    tree = Tree(os.getpid())

    assert "cores" in describe()
    assert os.getpid() in tree.pids()
    assert tree.cpu_s() > 0
    assert sum(part.pss_mib for part in tree.memory()) > 1
    assert usage(os.getpid()).cpu_s > 0
    assert load.ours > 0
    assert load.wall_s > 0
