"""What is kept of a run, and what is read out of it afterwards."""

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster import postmortem, run_folder
from cluster.cli import cli
from cluster.config import EngineOptions, ServeConfig
from cluster.environment import Environment
from cluster.postmortem_advice import advise
from engine import run_log
from engine.errors import ConfigError


@pytest.fixture(autouse=True)
def own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`keep` sets up the process it is called in; here that is everybody's."""
    root = logging.getLogger()
    handlers, level, access = root.handlers[:], root.level, logging.getLogger("api.edge").level
    levels = [(handler, handler.level) for handler in handlers]
    monkeypatch.setattr(run_log, "_folder", None)
    monkeypatch.setattr("faulthandler.enable", lambda file: None)
    monkeypatch.setattr("faulthandler.register", lambda *args, **options: None)
    yield
    root.handlers = handlers
    for handler, its_level in levels:
        handler.setLevel(its_level)
    root.setLevel(level)
    logging.getLogger("api.edge").setLevel(access)
    if run_log._stacks is not None:
        run_log._stacks.close()


def config(cache_dir: Path, **fields: object) -> ServeConfig:
    environment = Environment(cache_dir=cache_dir, api_keys=("sk-of-the-environment",))
    plain = ServeConfig(engine=EngineOptions(model="scripted"), environment=environment)
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


def only_run(cache_dir: Path) -> Path:
    [folder] = run_folder.find_runs(cache_dir)
    return folder


def run_that(cache_dir: Path, *, ends_with: int | None = None) -> Path:
    """A run in whose block something has been logged."""
    with run_folder.kept_run(config(cache_dir), "APIServer_0", lambda: ["step 3, IDLE for 0.0 s"]):
        logging.getLogger("test").error("first cause: worker DP0_PP0_TP0 pid=7 killed by SIGKILL")
        if ends_with is not None:
            run_folder.note_end(ends_with)
    return only_run(cache_dir)


def test_settings_are_kept_without_secrets(tmp_path: Path) -> None:
    """Keys of flags and of the environment; where a key lies is no secret."""
    settings = config(tmp_path, api_key=("sk-of-a-flag",), admin_key_file=Path("/etc/admin"))
    with run_folder.kept_run(settings, "APIServer_0", list):
        text = (only_run(tmp_path) / "run.json").read_text()
    assert "sk-of" not in text
    kept = json.loads(text)["settings"]
    assert kept["model"] == "scripted"
    assert kept["admin_key_file"] == "/etc/admin"
    assert kept["engine"]["tensor_parallel_size"] == 1


def test_a_run_tells_what_came_first(tmp_path: Path) -> None:
    """The first cause, how it ended, and what to do."""
    report = postmortem.examine(postmortem.read(run_that(tmp_path, ends_with=1)))
    assert report.verdict == "it ended with exit code 1"
    assert report.causes == ["worker DP0_PP0_TP0 pid=7 killed by SIGKILL"]
    assert "SIGKILL" in report.advice[0]


def test_a_command_without_a_last_word_was_killed(tmp_path: Path) -> None:
    """Its children say that it is gone, which is no other cause."""
    with run_folder.kept_run(config(tmp_path), "APIServer_0", list):
        logging.getLogger("test").error("first cause: parent process pid=7 is gone; ending with it")
        assert "still running" in postmortem.examine(postmortem.read(only_run(tmp_path))).verdict
    report = postmortem.examine(postmortem.read(only_run(tmp_path)))
    assert report.verdict == "the command itself was killed"
    [cause] = report.causes
    assert "ended without a word" in cause


@pytest.mark.parametrize(
    ("end", "survived", "causes"),
    [
        (None, ["a: SIGSEGV", "b: SIGBUS"], ["the command"]),
        ((0, ""), ["a: SIGSEGV", "b: SIGBUS"], []),
        ((1, ""), ["a: SIGSEGV"], ["b: SIGBUS"]),
        ((1, "", "rank 1: b: SIGBUS"), ["a: SIGSEGV"], ["b: SIGBUS"]),
        ((1, "", "c: SIGKILL"), ["a: SIGSEGV", "b: SIGBUS"], ["c: SIGKILL"]),
        ((2, "SIGBUS"), ["a: SIGSEGV"], ["SIGBUS"]),
        ((2, "no such model"), ["a: SIGSEGV", "b: SIGBUS"], ["no such model"]),
    ],
    ids=["killed", "stopped", "died", "heard", "elsewhere", "refused", "refused later"],
)
def test_what_was_survived_is_not_what_has_ended_it(
    tmp_path: Path, end: tuple[Any, ...] | None, survived: list[str], causes: list[str]
) -> None:
    """Ranks are replaced until one is not, or something else comes. While the server lives, nothing
    has ended it."""
    settings = config(tmp_path, on_engine_death="replace")
    with run_folder.kept_run(settings, "raywire", list):
        for loss in ("a: SIGSEGV", "b: SIGBUS"):
            logging.getLogger("test").error("first cause: %s", loss)
        report = postmortem.examine(postmortem.read(only_run(tmp_path)))
        assert (report.survived, report.causes) == (["a: SIGSEGV", "b: SIGBUS"], [])
        assert report.advice
        if end is not None:
            run_folder.note_end(*end)

    run = postmortem.read(only_run(tmp_path))
    report = postmortem.examine(run)
    assert report.survived == survived
    assert [cause.partition(" (pid")[0] for cause in report.causes] == causes
    text = postmortem.render(run, report)
    assert "survived\n  a: SIGSEGV\n" in text
    assert ("first cause\n" in text) == bool(causes)


def test_a_stop_in_order_has_no_cause(tmp_path: Path) -> None:
    """Nothing has died."""
    with run_folder.kept_run(config(tmp_path), "APIServer_0", list):
        run_folder.note_end(0)
    report = postmortem.examine(postmortem.read(only_run(tmp_path)))
    assert report.causes == report.advice == []
    assert "in order" in report.verdict


def test_a_mistake_in_the_settings_is_the_cause(tmp_path: Path) -> None:
    """It is never logged: the command prints it."""
    with run_folder.kept_run(config(tmp_path), "APIServer_0", list):
        run_folder.note_end(2, "no such model")
    assert postmortem.examine(postmortem.read(only_run(tmp_path))).causes == ["no such model"]


def test_a_cause_in_a_log_of_another_node_is_what_the_command_has_heard(tmp_path: Path) -> None:
    """Where no process of this one has logged any."""
    with run_folder.kept_run(config(tmp_path), "APIServer_0", list):
        run_folder.note_end(1, cause="worker DP1_PP0_TP0 pid=7 killed by SIGKILL")
    report = postmortem.examine(postmortem.read(only_run(tmp_path)))
    assert report.causes == ["worker DP1_PP0_TP0 pid=7 killed by SIGKILL"]


def test_the_number_of_runs_is_bounded(tmp_path: Path) -> None:
    """The oldest go; one that is under way stays, however old."""
    base = run_folder.runs_folder(tmp_path)
    for day in range(run_folder.MAX_RUNS + 5):
        (base / f"202501{day + 1:02}-000000-1").mkdir(parents=True)
    with run_folder.kept_run(config(tmp_path), "APIServer_0", list):
        runs = run_folder.find_runs(tmp_path)
        assert len(runs) == run_folder.MAX_RUNS
        assert run_folder.is_running(runs[-1])


def test_what_a_thousand_ranks_were_doing_is_kept_whole(tmp_path: Path) -> None:
    """Each in a few words; the file keeps its length, whatever they say later."""
    file = tmp_path / "last_seen.json"
    sizes = set()
    for seen in (["step 3, IDLE for 0.0 s"] * 999 + ["x" * 5000], [""] * 1000):
        run_folder.write_last_seen(tmp_path, seen)
        kept = json.loads(file.read_text())["engine_cores"]
        assert len(kept) == 1000
        assert kept[:999] == seen[:999]
        sizes.add(file.stat().st_size)
    assert len(sizes) == 1
    assert sizes.pop() < 200_000


def test_a_log_is_bounded(tmp_path: Path) -> None:
    """The last lines stay, in two files."""
    with run_folder.kept_run(config(tmp_path), "APIServer_0", list):
        for number in range(3000):
            logging.getLogger("test").info("line %d %s", number, "x" * 80)
    files = sorted((only_run(tmp_path) / "logs").iterdir())
    assert [file.name for file in files] == ["APIServer_0.log", "APIServer_0.log.1"]
    assert all(file.stat().st_size <= run_log.MAX_LOG_BYTES for file in files)
    assert "line 2999 " in postmortem.read(only_run(tmp_path)).logs[0].lines[-1]


@pytest.mark.row("S-27")
def test_requests_leave_nothing(tmp_path: Path) -> None:
    """Neither their access lines, nor what else is said of one of them below WARNING."""
    with run_folder.kept_run(config(tmp_path), "APIServer_0", list):
        logging.getLogger("api.edge").info("GET /v1/models")
        from engine.log import request_id

        token = request_id.set("r-1")
        logging.getLogger("test").info("of a request")
        request_id.reset(token)
        logging.getLogger("test").info("of the server")
    [log] = postmortem.read(only_run(tmp_path)).logs
    assert len(log.lines) == 1
    assert "of the server" in log.lines[0]


@pytest.mark.row("F-47")
def test_a_folder_that_cannot_be_made_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server runs, and one line says that nothing is kept."""
    caplog.set_level(logging.INFO)
    (tmp_path / "runs").write_text("in the way")
    with run_folder.kept_run(config(tmp_path), "APIServer_0", list):
        run_folder.note_end(0)
    assert "nothing is kept" in caplog.text


def test_the_command_shows_the_latest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FOLDER; as text and as JSON."""
    run_that(tmp_path, ends_with=1)
    monkeypatch.setenv("RAYWIRE_CACHE_DIR", str(tmp_path))
    text = CliRunner().invoke(cli, ["postmortem"]).output
    assert "first cause\n  worker DP0_PP0_TP0 pid=7 killed by SIGKILL\n" in text
    assert "what to do\n" in text
    as_json = json.loads(CliRunner().invoke(cli, ["postmortem", "--json"]).output)
    assert as_json["causes"] == ["worker DP0_PP0_TP0 pid=7 killed by SIGKILL"]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    """With where runs are."""
    with pytest.raises(ConfigError, match="no folder of a run"):
        postmortem.read(tmp_path)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("EngineCore_DP0 killed by SIGKILL; out of memory, probably: 1", "want of memory"),
        ("worker DP0_PP0_TP0 pid=1 killed by SIGBUS; /dev/shm has 0 of 64 MiB free", "/dev/shm"),
        ("worker DP0_PP0_TP0 pid=1 killed by SIGSEGV during load", "native code"),
        ("engine core DP3: hung: no heartbeat for 10.4 s", "stood still"),
        ("execute_model step 4 has no reply in 300 s", "RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS"),
        ("no READY within 15 s from engine core DP0", "--startup-timeout"),
        ("worker DP0_PP0_TP1 pid=1 failed in execute_model step 20: RuntimeError", "traceback"),
        ("anything else", "last lines"),
    ],
)
def test_each_cause_has_advice(cause: str, words: str) -> None:
    """What an operator can do."""
    assert words in advise(cause)[0]
