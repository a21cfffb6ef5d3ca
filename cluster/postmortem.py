"""What has ended a server, read from the folder of its run: `raywire postmortem`.

`read` gathers what the processes have left there (`run_folder`, `engine/run_log.py`), `examine`
decides what came first and what to do about it, `render` writes it down. Nothing is changed, and
nothing in the folder is believed to be more than text.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.postmortem_advice import advise
from cluster.run_folder import boot_id_is, is_running
from engine.errors import ConfigError
from engine.lifecycle import describe_exit
from workers.death_signs import DeathSigns, OomKills

NUM_LAST_LINES = 6
_MAX_FILE_BYTES = 1 << 20
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

_LINE = re.compile(r"(?P<level>[A-Z]+) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) (?P<process>\S+) pid=")
_CAUSE = re.compile(r"\] first cause: (?P<cause>.*)")
_PARENT_GONE = re.compile(r"parent process pid=\d+ is gone|the command, pid=\d+, is gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLog:
    """What one process has left."""

    name: str
    lines: Sequence[str]
    stacks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is in the folder of a run."""

    folder: Path
    about: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    last_seen: Mapping[str, Any]
    logs: Sequence[ProcessLog]
    is_running: bool
    signs: str
    """What the machine knows about a command that was killed, as long as it has not been started
    anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came first, and what to do."""

    verdict: str
    causes: Sequence[str]
    """Of its end, the first one first."""

    survived: Sequence[str]
    """First causes of losses that it has outlived, the first one first."""

    advice: Sequence[str]
    ends: Mapping[str, str]
    """How processes ended, by name, as far as it was seen."""


# ------------------------------------------------------------------------------------------- read


def read(folder: Path) -> Run:
    """Gather what is there; what is missing, or damaged by a full disk, is left out.

    Raises:
        ConfigError: it is no folder of a run.
    """
    about = _object(_text(folder / "run.json"))
    if not about:
        raise ConfigError(
            f"{folder} is no folder of a run; `raywire serve` keeps them in RAYWIRE_CACHE_DIR/runs,"
            " that is ~/.cache/raywire/runs unless it is set"
        )
    names = sorted(path.stem for path in (folder / "logs").glob("*.log"))
    return Run(
        folder=folder,
        about=about,
        events=[e for e in map(_object, _text(folder / "events.jsonl").splitlines()) if e],
        last_seen=_object(_text(folder / "last_seen.json")),
        logs=[
            ProcessLog(
                name=name,
                lines=[
                    line
                    for file in (f"{name}.log.1", f"{name}.log")
                    for line in _text(folder / "logs" / file).splitlines()
                ],
                stacks=_text(folder / "stacks" / f"{name}.txt"),
            )
            for name in names
        ],
        is_running=is_running(folder),
        signs=_signs(about),
    )


def _signs(about: Mapping[str, Any]) -> str:
    """Whether the kernel's OOM killer has been about since the run began."""
    kills = about.get("oom_kills")
    if not boot_id_is(about.get("boot_id")) or not isinstance(kills, dict):
        return ""
    before = OomKills(kills.get("of_group"), kills.get("of_machine"))
    return DeathSigns(before).of_exit(-9)


def _text(path: Path) -> str:
    if not path.is_file():  # a pipe would never end
        return ""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _object(text: str) -> dict[str, Any]:
    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def _mapping(value: object) -> dict[str, Any]:
    """Of a file that anybody may have written: an object where there should be one."""
    return value if isinstance(value, dict) else {}


def _printable(text: str) -> str:
    """Without what would move a terminal's cursor, or do worse to it."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


# ---------------------------------------------------------------------------------------- examine


def examine(run: Run) -> Report:
    """Decide what came first. Pure."""
    end = next((e for e in reversed(run.events) if e.get("event") == "end"), None)
    verdict, untold = _verdict(run, end)
    survived, causes = _part(run, end, untold)
    stacks = [log.name for log in run.logs if log.stacks.strip()]
    to_mend = causes[:1] or survived[-1:]
    return Report(
        verdict=verdict,
        causes=causes,
        survived=survived,
        advice=advise(to_mend[0], stacks) if to_mend else [],
        ends=_ends(run.events),
    )


def _verdict(run: Run, end: Mapping[str, Any] | None) -> tuple[str, str]:
    """How it has ended, and of what, if no process has logged it."""
    if run.is_running:
        return "it is still running; this is what has happened so far", ""
    if end is None:
        who = f"the command (pid {run.about.get('pid')})"
        cause = f"{who} has ended without a word: it was killed{run.signs}"
        return "the command itself was killed", cause
    if end.get("exit_code") == 0:
        return "it was stopped in order, with exit code 0", ""
    return f"it ended with exit code {end.get('exit_code')}", str(end.get("message") or "")


def _part(run: Run, end: Mapping[str, Any] | None, untold: str) -> tuple[list[str], list[str]]:
    """Losses that it has survived, and causes of its end."""
    told = _causes(run.logs, end)
    if end is None and not run.is_running:
        # What its children saw of it is no cause of its own.
        told = [cause for cause in told if not _PARENT_GONE.search(cause)]
    replaces = _mapping(run.about.get("settings")).get("on_engine_death") == "replace"
    if (end is not None and end.get("exit_code") == 0) or (run.is_running and replaces):
        return told, []
    if not replaces:
        return [], [*told, untold] if untold and (end is None or not told) else told
    if untold:
        return [cause for cause in told if untold not in cause], [untold]
    heard = str((end or {}).get("cause") or "")
    if heard and not any(_is_same(cause, heard) for cause in told):
        return told, [heard]  # of a rank on another node, where its log is
    return told[:-1], told[-1:]  # all but the last have been made good


def _is_same(cause: str, heard: str) -> bool:
    """A cause as who died has logged it, and as the command has heard of it."""
    return cause in heard or heard in cause


def _causes(logs: Sequence[ProcessLog], end: Mapping[str, Any] | None) -> list[str]:
    """What processes have logged as first causes, in the order of their times; where none has, as
    its log is on another node, what the command has heard of it."""
    found = [
        (head["time"], cause["cause"])
        for log in logs
        for line in log.lines
        if (head := _LINE.match(line)) and (cause := _CAUSE.search(line))
    ]
    if not found and end is not None and end.get("cause"):
        return [str(end["cause"])]
    return [cause for _, cause in sorted(found, key=lambda each: each[0])]


def _ends(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How processes ended, by name: what whoever watched them has noted."""
    return {
        str(event.get("process")): describe_exit(code)
        for event in events
        if event.get("event") == "exit" and isinstance(code := event.get("exit_code"), int)
    }


# ----------------------------------------------------------------------------------------- render


def render(run: Run, report: Report) -> str:
    """As people read it."""
    about, versions = run.about, _mapping(run.about.get("versions"))
    settings = _mapping(about.get("settings"))
    sections = [
        f"{run.folder}\n{settings.get('model')} on {about.get('node')}, from"
        f" {_clock(about.get('began'))}; raywire {versions.get('raywire')}, Python"
        f" {versions.get('python')}, {versions.get('system')}\n{report.verdict}"
    ]
    if report.causes:
        first, *later = report.causes
        sections.append(f"first cause\n  {first}")
        if later:
            sections.append("then\n" + "\n".join(f"  {cause}" for cause in later))
    if report.survived:
        sections.append("survived\n" + "\n".join(f"  {cause}" for cause in report.survived))
    if report.advice:
        sections.append("what to do\n" + "\n".join(f"  {line}" for line in report.advice))
    seen = run.last_seen.get("engine_cores")
    if isinstance(seen, list) and seen:
        told = "\n".join(f"  engine core {i}: {at or 'no heartbeat'}" for i, at in enumerate(seen))
        sections.append(
            f"engine cores, as last heard of at {_clock(run.last_seen.get('time'))}\n{told}"
        )
    sections.append("processes\n" + "\n".join(_processes(run, report)))
    sections.append("last lines\n" + "\n".join(_last_lines(run.logs)))
    return _printable("\n\n".join(sections) + "\n")


def to_json(run: Run, report: Report) -> dict[str, Any]:
    """The same for machines."""
    return {
        "folder": str(run.folder),
        "verdict": report.verdict,
        "is_running": run.is_running,
        "causes": list(report.causes),
        "survived": list(report.survived),
        "advice": list(report.advice),
        "ends": dict(report.ends),
        "last_seen": dict(run.last_seen),
        "events": [dict(event) for event in run.events],
        "about": dict(run.about),
        "stacks": {log.name: log.stacks for log in run.logs if log.stacks.strip()},
        "last_lines": {log.name: list(log.lines[-NUM_LAST_LINES:]) for log in run.logs},
    }


def _processes(run: Run, report: Report) -> list[str]:
    lines = []
    for event in run.events:
        if event.get("event") == "begin":
            name = str(event.get("process"))
            end = report.ends.get(name, "")
            where = f"pid={event.get('pid')} node={event.get('node')}"
            lines.append(f"  {name:22} {where} from {_clock(event.get('time'))} {end}".rstrip())
    return lines or ["  none has begun"]


def _last_lines(logs: Sequence[ProcessLog]) -> list[str]:
    lines = []
    for log in logs:
        lines += [f"  {line}" for line in log.lines[-NUM_LAST_LINES:]]
        if log.stacks.strip():
            lines.append(f"  its stacks: stacks/{log.name}.txt")
        lines.append("")
    return lines[:-1] or ["  none"]


def _clock(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return "?"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "?"
