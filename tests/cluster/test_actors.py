"""What runs in Ray's actors, without Ray: the plain classes, in this process."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster import actors, run_folder
from cluster.actors import EngineActor, EngineStart, variables_for_nodes
from cluster.deadline import Deadline
from cluster.model_on_node import PortableModel, make_portable, resolve_portable
from engine.config import CurveConfig, ModelConfig, WireConfig
from engine.errors import EXIT_CONFIG, ConfigError
from tests.helpers.core_process import make_config
from tests.helpers.fake_executor import start_fake
from tests.helpers.server import ROOT

HERE = "aa (10.0.0.1)"
NUM_THREADS = "OMP_NUM_THREADS"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYWIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An actor has a process of its own, which it makes its own."""
    monkeypatch.setattr("engine.log.configure", lambda *_: None)
    before, main_module = dict(os.environ), sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main_module
    os.environ.clear()
    os.environ.update(before)


def start_with(model: PortableModel | None = None, **variables: str) -> EngineStart:
    return EngineStart(
        config=make_config([]), model=model, node=HERE, command=None, variables=variables
    )


# ------------------------------------------------------------------------------------ the actor


def test_a_model_that_is_not_on_the_node_is_a_mistake_that_names_the_node(cache: Path) -> None:
    """The core ends with the code for settings, and the command prints the message."""
    actor = EngineActor(start_with(PortableModel(name="/models/nowhere")))

    end = actor.run(60.0)

    assert end.exit_code == EXIT_CONFIG
    assert end.cause == "on node aa (10.0.0.1): model folder /models/nowhere does not exist"


@pytest.mark.row("S-08")
def test_an_actor_makes_its_own_key_and_shows_the_public_half() -> None:
    """Only where the wires are encrypted; the secret half is nowhere in its answer."""
    plain = start_with()
    wire = dataclasses.replace(plain.config.wire, curve=CurveConfig(server_public_keys=()))
    encrypted = dataclasses.replace(plain, config=dataclasses.replace(plain.config, wire=wire))

    first, second = EngineActor(encrypted).describe(), EngineActor(encrypted).describe()

    assert EngineActor(plain).describe() == actors.Site(pid=os.getpid())
    assert first.public_key is not None
    assert len(first.public_key) == 40
    assert first.public_key != second.public_key


def test_an_actor_on_another_node_makes_room_for_its_run_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rule of the command's node: the oldest runs go, but not one that is under way."""
    monkeypatch.setattr("engine.run_log.keep", lambda *_, **__: None)
    base = run_folder.runs_folder(cache)
    names = [f"202501{day + 1:02}-000000-1" for day in range(run_folder.MAX_RUNS + 5)]
    for name in names:
        (base / name).mkdir(parents=True)

    def start_core(run: str) -> None:
        start = start_with(PortableModel(name="/models/nowhere"))
        config = dataclasses.replace(start.config, run_folder=f"/of/the/command/runs/{run}")
        EngineActor(dataclasses.replace(start, config=config))

    start_core(names[0])
    assert len(run_folder.find_runs(cache)) == len(names)  # it was there
    for _ in range(2):
        start_core("20260101-000000-7")

    left = [folder.name for folder in run_folder.find_runs(cache)]
    assert left == [names[0], *names[6:], "20260101-000000-7"]
    assert run_folder.is_running(base / names[0])
    assert not run_folder.is_running(base / names[6])


@pytest.mark.parametrize("stop_first", [False, True])
def test_stop_ends_run_whenever_it_comes(
    stop_first: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before `run` has begun; the core then ends as soon as it has loaded."""
    monkeypatch.setattr(actors, "start_executor", start_fake)
    start = start_with()
    # Somewhere to connect to: a thread that waits for no socket at all would never end.
    wire = WireConfig(
        request_addresses=(f"ipc://{cache}/r",), output_addresses=(f"ipc://{cache}/o",)
    )
    config = dataclasses.replace(start.config, wire=wire)
    actor = EngineActor(dataclasses.replace(start, config=config))

    with ThreadPoolExecutor(1) as pool:
        if stop_first:
            actor.stop()
        running = pool.submit(actor.run, 60.0)
        actor.stop()

        assert running.result(60).exit_code <= 0


# ----------------------------------------------------------------------------------- environment


def test_variables_of_the_command_count_on_every_node() -> None:
    """Ours and those of the hub's client, and the user's OMP_NUM_THREADS, which in a job is
    Ray's."""
    environ = {"RAYWIRE_CACHE_DIR": "/c", "HF_TOKEN": "t", "OMP_NUM_THREADS": "4", "PATH": "/bin"}

    assert variables_for_nodes(environ, is_ray_job=False) == {
        "RAYWIRE_CACHE_DIR": "/c",
        "HF_TOKEN": "t",
        "OMP_NUM_THREADS": "4",
    }
    assert "OMP_NUM_THREADS" not in variables_for_nodes(environ, is_ray_job=True)


@pytest.mark.parametrize(
    ("names_at_start", "given", "left"),
    [(set(), {}, None), ({NUM_THREADS}, {}, "1"), (set(), {NUM_THREADS: "5"}, "5")],
)
def test_threads_that_ray_has_chosen_do_not_count(
    names_at_start: set[str],
    given: dict[str, str],
    left: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OMP_NUM_THREADS is kept if the process was started with it, dropped if Ray has set it since,
    and replaced by the command's."""
    monkeypatch.setattr(actors, "_initial_environment", lambda: names_at_start)
    os.environ[NUM_THREADS] = "1"

    actors.adopt(given)

    assert os.environ.get(NUM_THREADS) == left


def test_what_was_set_since_the_start_is_told_apart() -> None:
    """The kernel remembers the variables that a process was started with. In a process of its own:
    who runs tests may have written its title over this one's."""
    code = (
        "import os; os.environ['SET_SINCE'] = '1';"
        "from cluster import actors; print(*actors._initial_environment())"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert "PATH" in shown.stdout.split()
    assert "SET_SINCE" not in shown.stdout.split()


# ----------------------------------------------------------------------------------------- model


def test_a_script_travels_and_its_file_need_not(tmp_path: Path, cache: Path) -> None:
    """Its folder is the same on every node: the fingerprints are equal."""
    file = tmp_path / "script.json"
    file.write_text('{"kind": "tokens", "token_ids": [104, 105]}')
    portable = make_portable(f"scripted:{file}")
    file.unlink()

    there = resolve_portable(portable, cache_dir=cache)

    assert there.model_type == "scripted"
    assert json.loads((there.path / "config.json").read_text())["script"] == portable.script


def test_a_path_travels_whole_and_other_names_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder of an actor is another; `demo` is the demo, whatever lies about."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "models"):
        (tmp_path / name).mkdir()

    assert make_portable("models").name == str(tmp_path / "models")
    assert make_portable("demo").name == "demo"
    assert make_portable("owner/name").name == "owner/name"


def test_a_node_without_room_for_the_model_says_so(tmp_path: Path) -> None:
    """A cache that cannot be written is a mistake with a name, not a traceback."""
    (tmp_path / "file").touch()
    script = PortableModel(name="scripted:x", script={"kind": "echo"})

    with pytest.raises(ConfigError, match="cannot write the script"):
        resolve_portable(script, cache_dir=tmp_path / "file")


def test_settings_of_the_model_are_those_of_the_node(cache: Path) -> None:
    """On the command's node nothing is looked for again."""
    script = PortableModel(name="scripted", script={"kind": "echo"})
    found = EngineActor(start_with(script))._config(Deadline(60.0)).model
    as_given = EngineActor(start_with())._config(Deadline(60.0)).model

    assert found.path.startswith(str(cache))
    assert found.model_type == "scripted"
    assert as_given == ModelConfig(path=os.devnull, model_type="scripted")


def test_workers_have_what_is_left_of_the_start(cache: Path) -> None:
    """Not the whole of it again; and never nothing, which is no timeout."""
    actor = EngineActor(start_with())

    assert 6.5 < actor._config(Deadline(7.0)).executor.start_timeout_s <= 7.0
    assert actor._config(Deadline(0.0)).executor.start_timeout_s > 0
