"""How our ZeroMQ sockets are made: kind, high-water mark, linger, access. Bind, then publish: no
port is ever guessed."""

import os
import secrets
import tempfile
from pathlib import Path

import zmq

from engine.errors import ConfigError

MAX_MESSAGE_BYTES = 1 << 30
"""Larger frames are refused by ZeroMQ before they are read, and the peer is disconnected."""

DEAD_LINGER_MS = 4000
"""How long an engine core's last words may take to leave."""

STOPPED_LINGER_MS = 300
"""The same after an ordered stop, of which nobody need be told."""


def make_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    *,
    identity: bytes | None = None,
    linger_ms: int = 0,
) -> "zmq.Socket[bytes]":
    """Make a socket with our settings. Queues are unbounded: the scheduler, not a socket, is where
    requests wait."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if kind == zmq.ROUTER:
        # An unroutable send raises: the rank is down. Identities are never taken over: a new
        # incarnation has a new one.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    return socket


def connect_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    address: str,
    *,
    identity: bytes | None = None,
) -> "zmq.Socket[bytes]":
    """Make a socket and connect it. None is left behind where that fails: a context does not end
    before its last socket is closed, and nobody can be written to without a connection."""
    socket = make_socket(context, kind, identity=identity)
    try:
        socket.connect(address)
    except BaseException:
        socket.close()
        raise
    return socket


def make_ipc_directory(base: str | None = None) -> Path:
    """Make the private folder (0700, random name) of one server's ipc sockets.

    Args:
        base: `RAYWIRE_RPC_BASE_PATH`, read by `cluster`; None is the system's temporary folder.
    """
    path = Path(base or tempfile.gettempdir()) / f"raywire-{os.getpid()}-{secrets.token_hex(8)}"
    # A Unix socket's path has at most 107 bytes.
    if len(os.fsencode(path)) > 80:
        raise ConfigError(
            f"the socket folder {path} is too long for ipc; set RAYWIRE_RPC_BASE_PATH"
            " to a shorter one"
        )
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot make the socket folder {path}: {error}; set RAYWIRE_RPC_BASE_PATH"
        ) from error
    return path


def bind_tcp(socket: "zmq.Socket[bytes]", host: str) -> str:
    """Bind to a port of the kernel's choice on exactly one address, and return the address to
    advertise. For engine cores on other machines, which come with issue 3."""
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
