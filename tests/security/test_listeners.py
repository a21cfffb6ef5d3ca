"""What a server with the settings that everybody has opens to others: its HTTP port."""

import ipaddress
import re
import stat
from pathlib import Path

import pytest

from tests.helpers.listeners import listening
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def is_loopback(address: str) -> bool:
    return not address.startswith(("@", "\0")) and ipaddress.ip_address(address).is_loopback


def socket_folder(server: Server) -> Path | None:
    """The folder of ipc sockets, once there are some in it."""
    for path in server.folder.iterdir():
        if path.name.startswith("raywire-") and len(list(path.iterdir())) >= 4:
            return path
    return None


@pytest.mark.row("S-04")
def test_on_one_node_others_can_reach_the_http_port_only() -> None:
    """Two ranks and two API servers: internal sockets are files in a folder of random name that is
    the owner's alone, and gone once all have connected; nothing has an abstract name."""
    with running_server("scripted", "-dp", "2", is_ready_awaited=False) as server:
        folder = wait_for(lambda: socket_folder(server), "a folder of sockets", 60)
        assert folder is not None
        assert re.fullmatch(r"raywire-\d+-[0-9a-f]{16}", folder.name)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert all(stat.S_ISSOCK(path.stat().st_mode) for path in folder.iterdir())
        server.wait_ready(200)

        found = list(listening(server.processes()))
        assert {port for *_, port in found} == {server.port}
        wait_for(lambda: not folder.exists(), "the folder is gone", 10)


@pytest.mark.row("S-04", "S-05")
def test_workers_that_compute_together_listen_on_loopback_only(tmp_path: Path) -> None:
    """torch's groups of two tensor ranks: they meet in a file, and what gloo opens is on `lo`."""
    model = tiny_model("llama", tmp_path)
    flags = ("-tp", "2", "--dtype", "float32")
    with running_server(str(model), *flags, is_ready_awaited=False) as server:
        server.wait_ready(200)
        found = list(listening(server.processes()))
        outside = {(title, port) for title, address, port in found if not is_loopback(address)}
        assert outside == {("RAYWIRE::APIServer_0", server.port)}
        inside = {title for title, address, _ in found if is_loopback(address)}
        assert inside == {f"RAYWIRE::Worker_DP0_PP0_TP{rank}" for rank in (0, 1)}
