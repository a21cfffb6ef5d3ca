"""What the machine tells of a process that was killed."""

import re
import signal
from pathlib import Path

import pytest

from workers import death_signs, resources
from workers.death_signs import DeathSigns, OomKills

BEFORE = OomKills(of_group=1, of_machine=4)


@pytest.mark.row("F-11")
@pytest.mark.parametrize(
    ("now", "words"),
    [
        (OomKills(2, 5), "; out of memory, probably: 1 OOM kill since the start in the control"),
        (OomKills(1, 6), "; out of memory, perhaps: 2 OOM kills since the start on this machine"),
        (OomKills(1, 4), "; not by the kernel's OOM killer"),
        (OomKills(None, 4), "; not by the kernel's OOM killer"),
        (OomKills(None, None), ""),
    ],
)
def test_sigkill_is_told_apart_from_the_kernels(
    monkeypatch: pytest.MonkeyPatch, now: OomKills, words: str
) -> None:
    """By what the kernel has counted since the process was started."""
    monkeypatch.setattr(OomKills, "read", lambda: now)
    told = DeathSigns(BEFORE).of_exit(-signal.SIGKILL)
    assert told.startswith(words)
    assert bool(told) == bool(words)


@pytest.mark.row("F-11")
def test_an_earlier_kill_is_no_sign_for_a_later_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that die together may both be of one; what was counted when another died is used up,
    also where that one had only lost a worker."""
    counts, now = [OomKills(1, 4)], [100.0]
    monkeypatch.setattr(OomKills, "read", lambda: counts[-1])
    signs = DeathSigns(clock=lambda: now[0])

    def of_kill(after_s: float) -> str:
        now[0] += after_s
        return signs.of_exit(-signal.SIGKILL)

    counts.append(OomKills(2, 5))
    assert "1 OOM kill since the start" in of_kill(3600.0)
    assert "1 OOM kill since the start" in of_kill(1.0)
    assert of_kill(60.0) == "; not by the kernel's OOM killer"

    counts.append(OomKills(4, 7))
    assert "2 OOM kills since the death before" in of_kill(3600.0)

    counts.append(OomKills(5, 8))
    now[0] += 60.0
    assert signs.of_exit(1) == ""
    assert of_kill(60.0) == "; not by the kernel's OOM killer"


def test_a_bus_error_and_a_full_disk_tell_of_shared_memory() -> None:
    """Where that is full, both are its doing."""
    signs = DeathSigns(BEFORE)
    room = r"; /dev/shm has \d+ of \d+ MiB free"
    assert re.fullmatch(room, signs.of_exit(-signal.SIGBUS))
    assert "/dev/shm" in signs.of_error("OSError: [Errno 28] No space left on device")
    assert signs.of_error("ValueError: no") == ""
    assert signs.of_exit(1) == signs.of_exit(-signal.SIGSEGV) == ""


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"memory.events": "low 0\nmax 7\noom 3\noom_kill 2\n"}, 2),  # version 2
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}, 5),  # version 1
        ({}, None),
    ],
)
def test_both_versions_of_control_groups_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], kills: int | None
) -> None:
    """Where neither shows the count, it is unknown rather than 0."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(resources, "cgroups", lambda controller: iter([tmp_path]))
    assert death_signs.OomKills.read().of_group == kills
