"""The folder of one run of `serve`, for `raywire postmortem`: what explains its end, also where the
end was a SIGKILL.

    RAYWIRE_CACHE_DIR/runs/20261130-221530-4711/
        run.json          settings without secrets, versions, the machine
        last_seen.json    what each engine core was doing, every 2 s
        events.jsonl, logs/, stacks/                          each process for itself (`run_log`)

The command makes it and holds a lock on run.json for as long as it lives, so that nobody takes a
run under way for one that has ended. Other nodes of a Ray cluster have a folder of the same name,
with what their engine cores leave, who hold the lock there. The last runs stay; older ones make
room. Where it cannot be made, or the disk is full, serving goes on without.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import platform
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import ServeConfig
from engine import __version__, run_log
from workers.death_signs import OomKills

logger = logging.getLogger(__name__)

MAX_RUNS = 20
"""Runs that stay: at most some hundred KiB for each process of each."""

BEAT_S = 2.0
"""How often it is written what engine cores are doing."""

_CORES_LOCK = "engine_cores.lock"
_NAME = re.compile(r"\d{8}-\d{6}-\d+")
_SECRET = re.compile(r"key|secret|password|credential", re.IGNORECASE)
_MAX_TEXT = 400
_MAX_SEEN_CHARS = 100
_SEEN_BYTES = 128
"""Of last_seen.json, for each engine core, and for what is around them."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def runs_folder(cache_dir: Path) -> Path:
    return cache_dir / "runs"


@contextlib.contextmanager
def kept_run(
    config: ServeConfig, title: str, last_seen: Callable[[], Sequence[str]]
) -> Iterator[None]:
    """Keep what explains the end of the server that runs in this block, and who ended it.

    Args:
        config: what was asked for.
        title: of this process in the log.
        last_seen: what each engine core was doing when it was last heard of.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = _make(config, stack)
        except OSError as error:
            logger.info("nothing is kept of this run for `raywire postmortem`: %s", error)
        else:
            run_log.keep(str(folder), title)
            stack.enter_context(_beating(folder, last_seen))
        yield


def join_run(cache_dir: Path, name: str) -> str | None:
    """The folder, on this node, of a run whose command is on another one, for an engine core that
    belongs to it. The first one here makes it, and room for it. None: it cannot be made."""
    base = runs_folder(cache_dir)
    folder = base / name
    try:
        if not folder.exists():
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
            _prune(base)
            folder.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        lock = os.open(folder / _CORES_LOCK, flags, 0o600)  # this process's, until it ends
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError as error:
        logger.info("nothing is kept of this run on this node: %s", error)
        return None
    return str(folder)


def note_end(exit_code: int, message: str = "", cause: str = "") -> None:
    """The command ends, in order or not. What is missing of a run without it was killed.

    Args:
        exit_code: of the command.
        message: what it says, where it cannot work.
        cause: of the death that ends it.
    """
    run_log.record("end", exit_code=exit_code, message=message[:_MAX_TEXT], cause=cause[:_MAX_TEXT])


def is_running(folder: Path) -> bool:
    """Whether the command of that run is alive, or, where that is on another node, one of its
    engine cores."""
    return _is_held(folder / "run.json", fcntl.LOCK_SH) or _is_held(
        folder / _CORES_LOCK, fcntl.LOCK_EX
    )


def find_runs(cache_dir: Path) -> list[Path]:
    """The runs that are kept, the latest last."""
    with contextlib.suppress(OSError):
        folders = [f for f in runs_folder(cache_dir).iterdir() if _NAME.fullmatch(f.name)]
        return sorted(folders, key=lambda f: (f.name[:15], f.stat().st_mtime))
    return []


def describe(config: ServeConfig) -> dict[str, Any]:
    """The settings, as run.json has them: without what is secret."""
    return {"model": config.engine.model, **_plain(config)}


# ------------------------------------------------------------------------------------------ parts


def _make(config: ServeConfig, stack: contextlib.ExitStack) -> Path:
    base = runs_folder(config.environment.cache_dir)
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    _prune(base)
    folder = base / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    kills = OomKills.read()
    about = {
        "began": round(time.time(), 3),
        "pid": os.getpid(),
        "node": socket.gethostname(),
        "boot_id": _boot_id(),
        "oom_kills": dataclasses.asdict(kills),
        "versions": {
            "raywire": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "settings": describe(config),
    }
    try:
        file = stack.enter_context((folder / "run.json").open("w"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump(about, file, indent=1)
        file.flush()
    except OSError:
        stack.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _is_held(path: Path, lock: int) -> bool:
    """Whether somebody holds a lock with which this one cannot be had."""
    if not path.is_file():  # a pipe would hold whoever opens it
        return False
    with contextlib.suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _prune(base: Path) -> None:
    """Make room for one more. Runs under way stay."""
    kept = find_runs(base.parent)
    for folder in kept[: max(0, len(kept) - MAX_RUNS + 1)]:
        if not is_running(folder):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _beating(folder: Path, last_seen: Callable[[], Sequence[str]]) -> Iterator[None]:
    is_over = threading.Event()

    def beat() -> None:
        before: list[str] = []
        while not is_over.wait(BEAT_S):
            now = list(last_seen())
            if now != before:
                before = now
                with contextlib.suppress(OSError):
                    write_last_seen(folder, now)

    thread = threading.Thread(target=beat, name="run-folder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(BEAT_S)


def write_last_seen(folder: Path, last_seen: Sequence[str]) -> None:
    """Over the old one, in one write and of the same length: the room is there once it has been
    written for the first time, so a disk that fills up later does no harm."""
    cores = [text[:_MAX_SEEN_CHARS] for text in last_seen]
    text = json.dumps({"time": round(time.time(), 3), "engine_cores": cores})
    data = text.encode().ljust(_SEEN_BYTES * (1 + len(cores)))
    descriptor = os.open(folder / "last_seen.json", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, data, 0)
    finally:
        os.close(descriptor)


def boot_id_is(boot_id: str | None) -> bool:
    """Whether the machine has not been started anew since."""
    return boot_id is not None and boot_id == _boot_id()


def _boot_id() -> str | None:
    try:
        return Path(_BOOT_ID).read_text().strip()
    except OSError:
        return None


def _plain(value: object) -> Any:
    """As JSON has it. Fields that are not shown in a `repr` are secret, and so is what is called
    so."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}…"
        case list() | tuple():
            return [_plain(each) for each in value[:64]]
        case Mapping():
            return {str(k): _plain(v) for k, v in value.items() if not _SECRET.search(str(k))}
    if dataclasses.is_dataclass(value):
        shown = (f.name for f in dataclasses.fields(value) if f.repr and not _is_secret(f.name))
        return {name: _plain(getattr(value, name)) for name in shown}
    return _plain(str(value))


def _is_secret(name: str) -> bool:
    """A key, but not where it lies."""
    return bool(_SECRET.search(name)) and not name.endswith("file")
