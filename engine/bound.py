"""Where a server's sockets are bound, known before anybody is told: bind, then publish.

A TCP socket is bound by the command's process, as a plain listening one, and held from then on. It
may be handed to a child process (multiprocessing carries it), and libzmq adopts it where it is
served. Thus all addresses are known before anything is spawned, and no port is ever picked,
released and hoped for. For ipc there is only a name, in a folder that belongs to this server.
"""

import contextlib
import errno
import ipaddress
import os
import socket as net
from dataclasses import dataclass

import zmq

from engine.config import CoordinatorAddresses
from engine.curve import CurveKeys
from engine.errors import ConfigError
from engine.sockets import allow_ipv6

_BACKLOG = 1024
"""Connections that wait until the socket is served."""


class BoundSocket:
    """One address. Used once: by `serve`, or by `close` in the process that has handed it on."""

    def __init__(self, address: str, listener: net.socket | None = None) -> None:
        self.address = address
        """What peers connect to: `ipc://…`, `tcp://host:port` or `tcp://[host]:port`."""
        self._listener = listener

    @classmethod
    def from_descriptor(cls, address: str, descriptor: int) -> "BoundSocket":
        """What another process has bound and handed to this one."""
        return cls(address, net.socket(fileno=descriptor))

    @property
    def descriptor(self) -> int | None:
        """Of the listening socket; None on ipc."""
        return None if self._listener is None else self._listener.fileno()

    def serve(self, socket: "zmq.Socket[bytes]") -> None:
        """Let a ZeroMQ socket accept connections here. TCP: it owns the listening socket now."""
        if self._listener is not None:
            allow_ipv6(socket, self.address)
            socket.setsockopt(zmq.USE_FD, self._listener.fileno())
        socket.bind(self.address)
        if self._listener is not None:
            self._listener.detach()

    def close(self) -> None:
        """Give it up, where it has not been served. Idempotent."""
        if self._listener is not None:
            self._listener.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWires:
    """The ends of wire 1 that one API server binds."""

    request: BoundSocket
    """ROUTER: requests out, READY in."""

    output: BoundSocket
    """PULL: outputs, heartbeats and last words in."""

    keys: CurveKeys | None = None
    """The server's pair; None on ipc, which is private without."""

    @property
    def public_key(self) -> bytes | None:
        return None if self.keys is None else self.keys.public

    def close(self) -> None:
        """In the process that has handed them on, or never served them. Idempotent."""
        self.request.close()
        self.output.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorWires(ServerWires):
    """Those of the DP coordinator: to engine cores it is one more API server."""

    publish: BoundSocket
    """XPUB: loads and waves, to API servers."""

    @property
    def addresses(self) -> CoordinatorAddresses:
        """What the others need to know."""
        return CoordinatorAddresses(
            request=self.request.address,
            output=self.output.address,
            publish=self.publish.address,
            public_key=self.public_key,
        )

    def close(self) -> None:
        for bound in (self.request, self.output, self.publish):
            bound.close()


def bind_tcp(host: str, port_range: tuple[int, int] | None = None) -> BoundSocket:
    """Bind and listen on exactly one address of this node.

    Args:
        host: an IPv4 or IPv6 address.
        port_range: first and last port to try; None leaves the choice to the kernel.

    Raises:
        ConfigError: the address is not ours, or no port of the range is free.
    """
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise ConfigError(f"wires are bound to one address of this node, not to all ({host})")
    first, last = port_range or (0, 0)
    for port in range(first, last + 1):
        try:
            return _listen(host, port)
        except OSError as error:
            if port == 0 or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(
                    f"cannot bind a wire to {host}: {error.strerror or error}; it must be an"
                    " address of this node that the other nodes reach"
                ) from error
    raise ConfigError(
        f"no port from {first} to {last} is free on {host}: widen --wire-port-range; each API"
        " server needs two ports and the coordinator three"
    )


def _listen(host: str, port: int) -> BoundSocket:
    family = net.AF_INET6 if ":" in host else net.AF_INET
    listener = net.socket(family, net.SOCK_STREAM)
    try:
        # Connections of an earlier server that are still dying do not keep a port of the range.
        listener.setsockopt(net.SOL_SOCKET, net.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Two bound sockets that do not listen may share a port: listening is what takes it.
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    os.set_blocking(listener.fileno(), False)  # as libzmq's own: accepting must never wait
    host, port = listener.getsockname()[:2]
    return BoundSocket(
        f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", listener
    )
