"""The ipc names of wire 1, chosen once.

The sockets lie in a folder of this server's own (0700, random name, the owner's pid in it).
Nothing is left of it once everyone has connected: connections outlive their names. A server that is
killed before that leaves the folder to the next start, which sweeps folders whose owner is gone.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from api.engine_client import ClientAddresses
from engine.config import WireConfig
from engine.sockets import make_ipc_directory

logger = logging.getLogger(__name__)

_FOLDER_NAME = re.compile(r"raywire-(\d+)-[0-9a-f]{16}")


class IpcFolder:
    """The folder of one server's ipc sockets, and the addresses in it."""

    def __init__(self, base: str | None) -> None:
        self.path = make_ipc_directory(base)
        # Held until we close or die, whatever kills us: how the next start tells an owner that is
        # alive from one that is gone, also where folders are shared between containers.
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def client_addresses(self, client_index: int = 0) -> ClientAddresses:
        """Where one API server binds."""
        return ClientAddresses(
            request=f"ipc://{self.path}/request-{client_index}",
            output=f"ipc://{self.path}/output-{client_index}",
        )

    def wire_config(self, num_clients: int = 1) -> WireConfig:
        """Where the engine cores connect."""
        clients = [self.client_addresses(i) for i in range(num_clients)]
        return WireConfig(
            request_addresses=tuple(client.request for client in clients),
            output_addresses=tuple(client.output for client in clients),
        )

    def remove(self) -> None:
        """Once everyone has connected, and at the end. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def ipc_folder(base: str | None) -> Iterator[IpcFolder]:
    """Make a folder for as long as the block runs, after sweeping what dead servers left."""
    sweep(ipc_base(base))
    folder = IpcFolder(base)
    try:
        yield folder
    finally:
        folder.remove()


def ipc_base(base: str | None) -> Path:
    """Where the folders of all servers are: `RAYWIRE_RPC_BASE_PATH`, or the temporary folder."""
    return Path(base or tempfile.gettempdir())


def sweep(base: Path) -> None:
    """Remove the folders of servers that were killed while they started."""
    with contextlib.suppress(OSError):
        for path in base.iterdir():
            if (name := _FOLDER_NAME.fullmatch(path.name)) and _is_orphan(path, int(name[1])):
                logger.info("removing the sockets of a dead server path=%s", path)
                shutil.rmtree(path, ignore_errors=True)


def _is_orphan(path: Path, owner_pid: int) -> bool:
    """Whether the folder is ours to remove: our user's, its owner dead, its lock free."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if Path(f"/proc/{owner_pid}").exists() or owner_pid == os.getpid():
            return False  # it may not have taken its lock yet
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(fd)
    return False
