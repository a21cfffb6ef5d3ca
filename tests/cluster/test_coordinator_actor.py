"""Where a coordinator under Ray binds, and where its successor does. As an actor it is in
tests/integration/test_ray_server.py and tests/faults/test_replaced_actors.py."""

import dataclasses
import stat
from pathlib import Path

import pytest

from cluster.coordinator_actor import CoordinatorStart, bind

START = CoordinatorStart(
    wires=None,
    host="127.0.0.1",
    port_range=None,
    num_engines=2,
    log_level="INFO",
    run_folder=None,
    command=None,
)


@pytest.mark.row("F-09")
def test_a_successor_is_found_where_its_predecessor_was(tmp_path: Path) -> None:
    """At the same ports and with the same keys, which engine cores and API servers were told."""
    start = dataclasses.replace(START, key_file=str(tmp_path / "keys"))
    first = bind(start)
    first.close()
    second = bind(dataclasses.replace(start, predecessor=first.addresses))
    second.close()

    assert second.addresses == first.addresses
    assert second.keys == first.keys


@pytest.mark.row("S-08")
def test_a_secret_key_is_in_a_private_file_only_if_there_may_be_a_successor(
    tmp_path: Path,
) -> None:
    """Which nobody else may read; and never in what passes through Ray."""
    key_file = tmp_path / "keys"
    start = dataclasses.replace(START, key_file=str(key_file))
    wires = bind(start)
    wires.close()

    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert wires.keys is not None
    assert wires.keys.secret in key_file.read_bytes()
    with pytest.raises(FileExistsError):
        bind(start)  # somebody else's file is not taken for ours
    key_file.unlink()
    bind(START).close()
    assert list(tmp_path.iterdir()) == []
