"""Where the wires of one server are bound, chosen once, before anybody is told.

With all engine cores on this node they are ipc: names in a folder of this server's own (0700,
random name, the owner's pid in it). With some elsewhere they are TCP ports of one address of this
node, bound and held by the command's process until whoever serves them takes them over, and
encrypted (`engine/bound.py`, `engine/curve.py`).

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
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.bound import BoundSocket, CoordinatorWires, ServerWires, bind_tcp
from engine.config import CoordinatorAddresses, CurveConfig, WireConfig
from engine.curve import CurveKeys
from engine.sockets import make_ipc_directory

logger = logging.getLogger(__name__)

_FOLDER_NAME = re.compile(r"raywire-(\d+)-[0-9a-f]{16}")


class IpcFolder:
    """The folder of one server's ipc sockets."""

    def __init__(self, base: str | None) -> None:
        self.path = make_ipc_directory(base)
        # Held until we close or die, whatever kills us: how the next start tells an owner that is
        # alive from one that is gone, also where folders are shared between containers.
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def socket(self, name: str) -> BoundSocket:
        """A place in the folder. Nothing is there before it is served."""
        return BoundSocket(f"ipc://{self.path}/{name}")

    def remove(self) -> None:
        """Once everyone has connected, and at the end. Idempotent, and from any thread."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1  # first: the number may be another file's after it
        if lock >= 0:
            os.close(lock)


class WireBinder:
    """Binds the wires of one server.

    Args:
        folder: takes the ipc sockets.
        host: the address of this node on which engine cores elsewhere reach it; None: all are on
            this node, and the wires are ipc.
        port_range: first and last port on `host`; None leaves the choice to the kernel.
    """

    def __init__(
        self,
        folder: IpcFolder,
        host: str | None = None,
        port_range: tuple[int, int] | None = None,
    ) -> None:
        self._folder = folder
        self._host = host
        self._port_range = port_range

    def api_server(self, index: int = 0) -> ServerWires:
        """The wires of one API server, with a key pair of its own where they are TCP.

        Raises:
            ConfigError: the address is not ours, or no port of the range is free.
        """
        with contextlib.ExitStack() as undo:
            wires = ServerWires(
                request=self._bind(f"request-{index}", undo),
                output=self._bind(f"output-{index}", undo),
                keys=self._keys(),
            )
            undo.pop_all()
        return wires

    def coordinator(self) -> CoordinatorWires:
        """The wires of the coordinator, if it runs on this node. Raises as `api_server` does."""
        with contextlib.ExitStack() as undo:
            wires = CoordinatorWires(
                request=self._bind("request-coordinator", undo),
                output=self._bind("output-coordinator", undo),
                publish=self._bind("publish-coordinator", undo),
                keys=self._keys(),
            )
            undo.pop_all()
        return wires

    def private_file(self, name: str) -> str:
        """The path of a file that lies beside the sockets, and is there as long as they are."""
        return str(self._folder.path / name)

    def _bind(self, name: str, undo: contextlib.ExitStack) -> BoundSocket:
        if self._host is None:
            return self._folder.socket(name)
        bound = bind_tcp(self._host, self._port_range)
        undo.callback(bound.close)
        return bound

    def _keys(self) -> CurveKeys | None:
        return None if self._host is None else CurveKeys.generate()


def wire_config(
    api_servers: Sequence[ServerWires],
    coordinator: CoordinatorAddresses | None = None,
    *,
    are_deaths_apart: bool = False,
) -> WireConfig:
    """Where the engine cores connect: the API servers by index, then the coordinator. Where the
    deaths of several are apart, each core tells its own first cause."""
    requests = [wires.request.address for wires in api_servers]
    outputs = [wires.output.address for wires in api_servers]
    keys = [wires.public_key for wires in api_servers]
    if coordinator is not None:
        requests.append(coordinator.request)
        outputs.append(coordinator.output)
        keys.append(coordinator.public_key)
    public_keys = tuple(key for key in keys if key is not None)
    assert len(public_keys) in (0, len(keys)), "some wires are encrypted and some are not"
    return WireConfig(
        request_addresses=tuple(requests),
        output_addresses=tuple(outputs),
        coordinator_index=None if coordinator is None else len(api_servers),
        tells_first_cause=coordinator is None or are_deaths_apart,
        curve=CurveConfig(server_public_keys=public_keys) if public_keys else None,
    )


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
