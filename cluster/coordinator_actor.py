"""The DP coordinator as an actor on the command's node. Used by `ray_coordinator`; nothing here
imports Ray.

Where it may be replaced, the next one has to be found where this one was: at its ports, and with
its keys. They are in a file of the server's own folder then, which only this node's user reads; no
secret key passes through Ray.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.actors import End, Site
from cluster.command_watch import ProcessIdentity, end_with
from cluster.coordinator_process import CoordinatorServer
from engine import log, run_log
from engine.bound import BoundSocket, CoordinatorWires, bind_tcp
from engine.config import CoordinatorAddresses
from engine.curve import CurveKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStart:
    """All that the coordinator is given."""

    wires: CoordinatorWires | None
    """The names of ipc sockets; None: TCP."""

    host: str | None
    """The address to bind over TCP, with a key pair of its own."""

    port_range: tuple[int, int] | None
    num_engines: int
    log_level: str
    run_folder: str | None
    command: ProcessIdentity | None
    """The command's process, on the same node."""

    key_file: str | None = None
    """Where the key pair is kept for a successor; None: nowhere."""

    predecessor: CoordinatorAddresses | None = None
    """Where the one before had bound; None: there was none."""


class CoordinatorActor:
    """The DP coordinator, with its sockets."""

    def __init__(self, start: CoordinatorStart) -> None:
        log.configure("DPCoordinator", start.log_level)
        run_log.keep(start.run_folder, "DPCoordinator", catches_crashes=False)
        if start.command is not None:
            end_with(start.command)
        self._server = CoordinatorServer(
            start.wires or bind(start),
            start.num_engines,
            is_successor=start.predecessor is not None,
        )

    def describe(self) -> Site:
        return Site(pid=os.getpid())

    def bind(self, api_server_keys: Sequence[bytes]) -> CoordinatorAddresses:
        addresses = self._server.bind()
        self._server.allow(api_server_keys)
        return addresses

    def allow(self, public_keys: Sequence[bytes]) -> None:
        """Admit engine cores with these keys."""
        self._server.allow(public_keys)

    def run(self) -> End:
        """Serve until `stop`. An exception is Ray's to carry: the command logs it."""
        self._server.run()
        return End(exit_code=0)

    def stop(self) -> None:
        """End `run`. Returns at once."""
        self._server.stop()


def bind(start: CoordinatorStart) -> CoordinatorWires:
    """Bind over TCP: where the predecessor was, and with its keys, if there was one."""
    assert start.host is not None
    keys = _keys(start)
    before = start.predecessor
    places = (None,) * 3 if before is None else (before.request, before.output, before.publish)
    request, output, publish = (_bind_port(start, place) for place in places)
    return CoordinatorWires(request=request, output=output, publish=publish, keys=keys)


def _bind_port(start: CoordinatorStart, address: str | None) -> BoundSocket:
    assert start.host is not None
    if address is None:
        return bind_tcp(start.host, start.port_range)
    port = int(address.rpartition(":")[2])
    return bind_tcp(start.host, (port, port))


def _keys(start: CoordinatorStart) -> CurveKeys:
    if start.key_file is None:
        return CurveKeys.generate()
    path = Path(start.key_file)
    if start.predecessor is None:
        keys = CurveKeys.generate()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(b" ".join((keys.public, keys.secret)))
        return keys
    return CurveKeys(*path.read_bytes().split(b" "))
