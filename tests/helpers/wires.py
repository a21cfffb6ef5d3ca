"""Wires for tests: names for ipc, and bound, encrypted ends on loopback."""

from pathlib import Path

from engine.bound import BoundSocket, ServerWires, bind_tcp
from engine.curve import CurveKeys
from engine.errors import ConfigError


def ipc_wires(folder: Path, index: int = 0) -> ServerWires:
    """Those of one API server in `folder`."""
    return ServerWires(
        request=BoundSocket(f"ipc://{folder}/request-{index}"),
        output=BoundSocket(f"ipc://{folder}/output-{index}"),
    )


def tcp_wires(host: str = "127.0.0.1") -> ServerWires:
    """Those of one API server on `host`, encrypted."""
    return ServerWires(request=bind_tcp(host), output=bind_tcp(host), keys=CurveKeys.generate())


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on. For tests of port ranges only: somebody may take it."""
    bound = bind_tcp(host)
    bound.close()
    return int(bound.address.rpartition(":")[2])


def has_ipv6() -> bool:
    try:
        bind_tcp("::1").close()
    except ConfigError:
        return False
    return True
