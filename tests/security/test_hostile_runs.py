"""The folder of a run is text, and `raywire postmortem` believes nothing in it to be more."""

import json
import os
import pickle
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import cli
from cluster.run_folder import _boot_id
from engine.errors import EXIT_CONFIG, ConfigError

FILES = ("run.json", "events.jsonl", "last_seen.json", "logs/Worker.log", "stacks/Worker.txt")


class Exploit:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def make_run(folder: Path, **files: bytes) -> Path:
    """The folder of a run, with other contents for some of its files, by their stems."""
    (folder / "logs").mkdir(parents=True)
    (folder / "stacks").mkdir()
    for name in FILES:
        usual = b'{"pid": 1}' if name == "run.json" else b""
        (folder / name).write_bytes(files.get(Path(name).stem, usual))
    return folder


def postmortem(folder: Path, *flags: str) -> tuple[int, str]:
    """Exit code and what is shown; any error but a refusal in one line is one of the test."""
    done = CliRunner().invoke(cli, ["postmortem", str(folder), *flags])
    if isinstance(done.exception, ConfigError):  # `main` makes it a line and exit code 2
        return EXIT_CONFIG, str(done.exception)
    assert done.exception is None, done.exc_info
    return done.exit_code, done.output


DEEP = b"[" * 100_000
TYPES: list[object] = [None, 5, -1e999, "x", [], [[]], {}, {"a": {}}, True]


@pytest.mark.row("S-06")
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_runs_nothing(name: str, tmp_path: Path) -> None:
    """A pickle, bytes at random, endless nesting, each in the place of any file: it is left out, or
    shown as text, or the folder is refused in one line."""
    trap = tmp_path / "trap"
    rng = random.Random(name)
    contents = [pickle.dumps(Exploit(trap)), rng.randbytes(5000), DEEP, b'{"a":' * 100_000]
    for number, content in enumerate(contents):
        folder = make_run(tmp_path / str(number), **{Path(name).stem: content})
        for flags in ((), ("--json",)):
            code, shown = postmortem(folder, *flags)
            assert code == (2 if name == "run.json" else 0), shown
            assert "Traceback" not in shown
    assert not trap.exists()


@pytest.mark.row("S-06")
@pytest.mark.parametrize("value", TYPES, ids=str)
def test_values_of_other_types_are_left_out(value: object, tmp_path: Path) -> None:
    """In every field that is read."""
    about = dict.fromkeys(["pid", "node", "began", "versions", "settings", "oom_kills"], value)
    event = dict.fromkeys(["process", "pid", "node", "time", "exit_code", "message"], value)
    events = [{**event, "event": each} for each in ("begin", "exit", "end", value)]
    folder = make_run(
        tmp_path / "run",
        run=json.dumps({**about, "boot_id": _boot_id()}).encode(),
        events="\n".join(map(json.dumps, [*events, value])).encode(),
        last_seen=json.dumps({"time": value, "engine_cores": value}).encode(),
    )
    for flags in ((), ("--json",)):
        assert postmortem(folder, *flags)[0] == 0


@pytest.mark.row("S-06")
def test_a_log_cannot_take_over_the_terminal(tmp_path: Path) -> None:
    """Escape sequences are shown as characters that do nothing."""
    evil = b"ERROR 11-30 10:00:00 W pid=1 x] first cause: \x1b]0;owned\x07\x1b[2J\x9b31m\rgone"
    about = json.dumps({"pid": 1, "node": "\x1b[2J"}).encode()
    code, shown = postmortem(make_run(tmp_path / "run", run=about, Worker=evil))
    assert code == 0
    assert "owned" in shown
    assert not set(shown) & set(map(chr, (*range(10), *range(11, 32), *range(127, 160))))


@pytest.mark.row("S-06")
@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_does_not_hold_it_up(tmp_path: Path) -> None:
    """Reading it would wait for a writer for ever."""
    folder = make_run(tmp_path / "run")
    for name in FILES:
        (folder / name).unlink()
        os.mkfifo(folder / name)
        if name == "run.json":
            assert postmortem(folder)[0] == 2
            (folder / name).unlink()
            (folder / name).write_text('{"pid": 1}')
    assert postmortem(folder)[0] == 0
