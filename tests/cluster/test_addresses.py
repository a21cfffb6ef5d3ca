"""Wires: bound before anybody is told. Socket folders: private, and gone afterwards."""

import contextlib
import os
import pickle
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.addresses import IpcFolder, WireBinder, ipc_folder, sweep, wire_config
from engine.bound import bind_tcp
from engine.errors import ConfigError
from tests.helpers.wires import free_port


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


@pytest.mark.row("S-04")
def test_the_folder_is_private_and_short_lived(base: Path) -> None:
    """Mode 0700, the owner's pid in the name, and gone with the block."""
    with ipc_folder(str(base)) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert folder.path.name.startswith(f"raywire-{os.getpid()}-")
        (folder.path / "request-0").touch()
    assert not list(base.iterdir())


def test_local_wires_are_names_in_the_folder(base: Path) -> None:
    """Nothing listens yet, nothing is encrypted, and engine cores hear of the coordinator last."""
    with ipc_folder(str(base)) as folder:
        binder = WireBinder(folder)
        servers, coordinator = [binder.api_server(i) for i in range(2)], binder.coordinator()
        config = wire_config(servers, coordinator.addresses)

        assert list(folder.path.iterdir()) == []
        assert config.request_addresses == tuple(
            f"ipc://{folder.path}/request-{name}" for name in ("0", "1", "coordinator")
        )
        assert len(config.output_addresses) == 3
        assert config.coordinator_index == 2
        assert config.curve is None
        assert wire_config(servers).coordinator_index is None


def test_wires_to_other_nodes_are_ports_with_a_key_for_each_server(base: Path) -> None:
    """All on the one address, all different; engine cores get the public keys only."""
    with ipc_folder(str(base)) as folder, contextlib.ExitStack() as stack:
        binder = WireBinder(folder, "127.0.0.1")
        servers = [stack.enter_context(contextlib.closing(binder.api_server(i))) for i in (0, 1)]
        coordinator = stack.enter_context(contextlib.closing(binder.coordinator()))
        config = wire_config(servers, coordinator.addresses)

        addresses = (*config.request_addresses, *config.output_addresses)
        assert len({*addresses, coordinator.addresses.publish}) == 7
        assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)
        assert config.curve is not None
        assert len(set(config.curve.server_public_keys)) == 3
        secrets = [wires.keys.secret for wires in (*servers, coordinator) if wires.keys]
        assert not any(secret in pickle.dumps(config) for secret in secrets)


def test_wires_that_do_not_all_fit_leave_no_port_taken(base: Path) -> None:
    """The second of two finds no port: the first is given back."""
    with ipc_folder(str(base)) as folder:
        port = free_port()
        binder = WireBinder(folder, "127.0.0.1", (port, port))
        with pytest.raises(ConfigError, match="widen --wire-port-range"):
            binder.api_server()
        bind_tcp("127.0.0.1", (port, port)).close()


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
