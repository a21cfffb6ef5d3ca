"""Shared memory: reserved, nameless, sealed, and sized to what there is."""

import contextlib
import os
import subprocess

import pytest

from engine.errors import ConfigError
from workers import resources, shared_memory
from workers.shared_memory import MIN_CHUNK_BYTES, NamelessFile, SharedMemory, fit_chunk_bytes

MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["memfd", "without memfd"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the system call and, as for builds of Python that lack it, without."""
    if not request.param:
        monkeypatch.setattr(shared_memory, "has_memfd", lambda: False)
    return bool(request.param)


@pytest.mark.row("F-43")
def test_every_page_is_there_from_the_start(kind: bool) -> None:
    """A later write cannot meet a full memory: that would be a SIGBUS."""
    with contextlib.closing(SharedMemory.reserve(8 * MIB)) as memory:
        assert os.stat(memory.file.path).st_blocks * 512 >= 8 * MIB


def test_it_has_no_name(kind: bool) -> None:
    """Nothing to find and nothing to clean up, already while it lives."""
    with contextlib.closing(SharedMemory.reserve(MIB)) as memory:
        assert os.readlink(memory.file.path).endswith(" (deleted)")
        assert os.stat(memory.file.path).st_nlink == 0
        memory.bytes[:5] = b"hello"
        assert memory.bytes[:5] == b"hello"


@pytest.mark.row("F-43")
def test_nobody_can_shrink_it() -> None:
    """Memory cut off under a mapping would be a SIGBUS too."""
    with contextlib.closing(SharedMemory.reserve(MIB)) as memory:
        with pytest.raises(PermissionError):
            os.truncate(memory.file.path, 0)


@pytest.mark.row("F-43")
def test_too_little_memory_is_a_config_error(kind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, with what is needed and what is free, and no descriptor lost."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    files = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match=r"reserve 3\.0 MiB .*No space left.* MiB are free"):
        SharedMemory.reserve(3 * MIB)
    assert os.listdir("/proc/self/fd") == files


def test_meeting_place_is_one_file_for_many_openers(kind: bool) -> None:
    """A child that has inherited the descriptor opens the same nameless file by its own path."""
    with contextlib.closing(NamelessFile.create()) as file:
        os.set_inheritable(file.fd, True)
        subprocess.run(["sh", "-c", f"echo here >> {file.path}"], close_fds=False, check=True)
        with open(file.path) as mine:
            assert mine.read() == "here\n"


def test_chunks_are_as_large_as_asked_where_there_is_room() -> None:
    """And they fit exactly."""
    assert fit_chunk_bytes(16 * MIB, 14, room=14 * 16 * MIB) == 16 * MIB


@pytest.mark.row("F-43")
def test_chunks_shrink_to_what_fits() -> None:
    """All rings together stay within the room, in whole pages."""
    fitting = fit_chunk_bytes(16 * MIB, 14, room=60 * MIB)
    assert MIN_CHUNK_BYTES <= fitting < 16 * MIB
    assert fitting % 4096 == 0
    assert 14 * fitting <= 60 * MIB < 14 * (fitting + 4096)


@pytest.mark.row("F-43")
def test_less_than_the_least_is_an_error_with_numbers() -> None:
    """Below a mebibyte a chunk, needed and free are named."""
    with pytest.raises(ConfigError, match=r"need 14 MiB .*may take 10 MiB"):
        fit_chunk_bytes(16 * MIB, 14, room=10 * MIB)


@pytest.mark.row("F-43")
def test_small_mount_counts_only_without_memfd(kind: bool) -> None:
    """A container's 64 MiB in /dev/shm do not limit a memfd."""
    mount = os.statvfs("/dev/shm")
    room = shared_memory.room_for_rings(num_local_engines=1)
    assert room > 0
    if not kind:
        assert room <= mount.f_bavail * mount.f_frsize


def test_engines_of_one_machine_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the free memory for all of them together."""
    monkeypatch.setattr(resources, "available_memory", lambda: 80 * MIB)
    assert shared_memory.room_for_rings(num_local_engines=4) == 5 * MIB
