"""Ports and socket folders: taken early, private, and gone afterwards."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.addresses import IpcFolder, bind_http, ipc_folder, sweep
from engine.errors import ConfigError


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


def test_a_port_in_use_is_refused_by_number() -> None:
    """Also by a socket that listens but has not accepted anything."""
    with bind_http("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            bind_http("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_refused() -> None:
    """With the address in the message."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind_http("192.0.2.1", 0)


def test_a_name_that_does_not_resolve_is_refused() -> None:
    """A host name's failure is a line too, not a traceback."""
    with pytest.raises(ConfigError, match=r"cannot listen on no-such-host\.invalid"):
        bind_http("no-such-host.invalid", 0)


def test_ipv6() -> None:
    """An address with colons binds to IPv6."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with bind_http("::1", 0) as http_socket:
        assert http_socket.family == socket.AF_INET6


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
