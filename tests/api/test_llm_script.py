"""Scripts of users that make an `LLM`: forked, spawned, guarded or not, closed or not."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.scripted_models import make_scripted_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_scripted_model(tmp_path / "echo", kind="echo")


def run(tmp_path: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does; afterwards no process and no socket of it must be left."""
    file = tmp_path / "script.py"
    file.write_text(script)
    # Not in `tmp_path`, which is too long for a socket's name.
    with tempfile.TemporaryDirectory(prefix="rw") as folder:
        sockets = Path(folder)
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAYWIRE_RPC_BASE_PATH": folder}
        done = subprocess.run(
            [sys.executable, str(file)],
            env={**os.environ, **ours, **variables},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        deadline = time.monotonic() + 5.0
        while left := processes_of(sockets):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert list(sockets.iterdir()) == []
    return done


def processes_of(sockets: Path) -> list[psutil.Process]:
    """Whatever runs with our folder of sockets in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAYWIRE_RPC_BASE_PATH") == str(sockets):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_plain_script_forks_and_cleans_up(tmp_path: Path, model: Path) -> None:
    """Without a guard, twice in a row, the second without `close`; and nothing is left of it."""
    done = run(
        tmp_path,
        f"""
from api import LLM, SamplingParams
with LLM({str(model)!r}) as first:
    first.generate("bye")
llm = LLM({str(model)!r})
print("answer:", llm.generate("hello", SamplingParams(temperature=0))[0].outputs[0].text)
""",
    )

    assert done.stdout == "answer: hello\n", done.stderr
    assert done.returncode == 0
    assert "spawned" not in done.stderr


@pytest.mark.row("F-12")
def test_with_other_threads_it_spawns_and_says_so(tmp_path: Path, model: Path) -> None:
    """A fork would inherit their locks. The guarded script runs once, though imported again."""
    done = run(
        tmp_path,
        f"""
import threading
from api import LLM, SamplingParams
if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True, name="prefetch").start()
    with LLM({str(model)!r}) as llm:
        print("answer:", llm.generate("hello", use_tqdm=False)[0].outputs[0].text)
""",
    )

    assert done.stdout == "answer: hello\n", done.stderr
    assert "other threads run in this process (prefetch)" in done.stderr


def test_an_unguarded_script_that_spawns_is_told_what_to_add(tmp_path: Path, model: Path) -> None:
    """Soon, once, and without a second engine."""
    began = time.monotonic()
    done = run(
        tmp_path,
        f"""
from api import LLM
print("imported")
llm = LLM({str(model)!r})
""",
        RAYWIRE_WORKER_MULTIPROC_METHOD="spawn",
    )

    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr
    assert done.stderr.count("ConfigError") == 1
    assert done.stdout.count("imported") == 2
    assert time.monotonic() - began < 60


def test_importing_the_names_is_light(tmp_path: Path) -> None:
    """No torch, no transformers, no cluster: they come when an LLM is made, or never."""
    done = run(
        tmp_path,
        """
import sys
from api import LLM, SamplingParams
print(*{"torch", "transformers", "cluster", "uvicorn"} & set(sys.modules))
""",
    )

    assert done.stdout == "\n", done.stderr


def test_a_fork_of_the_script_leaves_the_engine_alone(tmp_path: Path, model: Path) -> None:
    """The child ends quickly and quietly, the usual way, and its parent goes on; what it cannot do
    it is told."""
    done = run(
        tmp_path,
        f"""
import os, sys
from api import LLM
llm = LLM({str(model)!r})
if os.fork() == 0:
    try:
        llm.generate("hello", use_tqdm=False)
    except Exception as error:
        print(type(error).__name__, "belongs to process" in str(error), flush=True)
    llm.close()
    sys.exit()
print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
print("answer:", llm.generate("hello", use_tqdm=False)[0].outputs[0].text)
""",
    )

    assert done.stdout == "UnavailableError True\nexit code 0\nanswer: hello\n", done.stderr
    assert done.stderr == ""
