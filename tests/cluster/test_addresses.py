"""Socket folders: private, and gone afterwards."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.addresses import IpcFolder, ipc_folder, sweep


@pytest.fixture
def base() -> Iterator[Path]:
    """An empty folder. Not pytest's, whose path is too long for a socket's."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        yield Path(folder)


def dead_pid() -> int:
    """The pid of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_folder_is_private_and_short_lived(base: Path) -> None:
    """Mode 0700, the owner's pid in the name, and gone with the block."""
    with ipc_folder(str(base)) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert folder.path.name.startswith(f"raywire-{os.getpid()}-")
        client, wire = folder.client_addresses(), folder.wire_config()
        assert (client.request,) == wire.request_addresses
        assert (client.output,) == wire.output_addresses
        (folder.path / "request-0").touch()
    assert not list(base.iterdir())


def test_folders_of_dead_servers_are_swept(base: Path) -> None:
    """A server that was killed while starting leaves one; the next start removes it."""
    orphan = base / f"raywire-{dead_pid()}-0123456789abcdef"
    orphan.mkdir()
    (orphan / "request-0").touch()

    sweep(base)

    assert not orphan.exists()


def test_only_what_is_certainly_an_orphan_is_swept(base: Path) -> None:
    """Not the living's, not one whose lock is held from another container, not other people's."""
    living = IpcFolder(str(base))
    locked = IpcFolder(str(base))
    elsewhere = locked.path.rename(base / f"raywire-{dead_pid()}-0123456789abcdef")
    other = base / "raywire-notes"
    other.mkdir()
    link = base / f"raywire-{dead_pid()}-fedcba9876543210"
    link.symlink_to(other)

    sweep(base)

    assert all(path.exists() for path in (living.path, elsewhere, other, link))
    living.remove()
    locked.remove()
    sweep(base)
    assert not elsewhere.exists()
