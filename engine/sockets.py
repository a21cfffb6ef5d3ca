"""How our ZeroMQ sockets are made: kind, high-water mark, linger, patience with a link, access.

A TCP connection outlives a cut of its link: for a minute nobody gives up, nothing is lost, and
TCP sends again what is missing when the link is back. ZeroMQ's own heartbeats stay off, since
they would end it sooner; ours (`wire.Heartbeat`) are messages, and decide about ranks.
"""

import logging
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from engine.curve import CurveLink, make_client
from engine.errors import ConfigError, WireError
from engine.thinning import ThinnedCount

logger = logging.getLogger(__name__)

BURST = 64
"""Messages read from one socket before others get their turn."""

MAX_MESSAGE_BYTES = 1 << 30
"""Larger frames are refused by ZeroMQ before they are read, and the peer is disconnected."""

DEAD_LINGER_MS = 4000
"""How long an engine core's last words may take to leave."""

STOPPED_LINGER_MS = 300
"""The same after an ordered stop, of which nobody need be told."""

LINK_PATIENCE_S = 180
"""A TCP connection whose peer has been silent for this long is given up by both ends. Until then
the ROUTER would refuse a new one that the peer makes under the same identity. More than twice the
minute that a link may be down: TCP doubles its pauses, and may try again only then."""

HANDSHAKE_TIMEOUT_S = 5
"""Who is not greeted by then, or not let in, hangs up and tries again."""

# Numbers: ZeroMQ's enumerations are made anew with each operation on them.
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)

_FIRST_PROBE_S = 60
_PROBE_INTERVAL_S = 15


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
    _be_patient(socket)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if kind == zmq.ROUTER:
        # An unroutable send raises: the rank is down. Identities are never taken over: a new
        # incarnation has a new one.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    return socket


def allow_ipv6(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Before it is bound or connected to `address`. Only where that is IPv6: with it, libzmq makes
    IPv6 sockets for IPv4 too, which some machines cannot."""
    socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))


def _be_patient(socket: "zmq.Socket[bytes]") -> None:
    """Notice a dead TCP link after `LINK_PATIENCE_S`, with and without data under way, and connect
    again by and by."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _FIRST_PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _PROBE_INTERVAL_S)
    probes = (LINK_PATIENCE_S - _FIRST_PROBE_S) // _PROBE_INTERVAL_S
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, probes)
    socket.setsockopt(zmq.TCP_MAXRT, LINK_PATIENCE_S * 1000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_S * 1000)
    # From 0.1 s, doubled up to this: a peer that is gone for good is not called ten times a second.
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def connect_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    address: str,
    *,
    identity: bytes | None = None,
    curve: CurveLink | None = None,
) -> "zmq.Socket[bytes]":
    """Make a socket and connect it, encrypted if `curve` is given.

    None is left behind where that fails: a context does not end before its last socket is closed,
    and nobody can be written to without a connection.
    """
    socket = make_socket(context, kind, identity=identity)
    try:
        if curve is not None:
            make_client(socket, curve)
        allow_ipv6(socket, address)
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


def has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be received without waiting. Asking costs a fraction of the exception
    that an empty socket raises, and each burst ends with an empty one."""
    return bool(int(socket.getsockopt(_EVENTS)) & _READABLE)


def read_burst(
    socket: "zmq.Socket[bytes]",
    take: Callable[[list[bytes]], None],
    bad_messages: ThinnedCount,
) -> bool:
    """Take in what has come, but no more than BURST messages at once, so that others get a turn.

    A message that breaks the protocol (WireError from `take`) is counted and dropped.

    Returns:
        Whether there may be more.
    """
    for _ in range(BURST):
        if not has_message(socket):
            return False
        frames = socket.recv_multipart(zmq.NOBLOCK)
        try:
            take(frames)
        except WireError as error:
            if bad_messages.add():
                logger.warning("dropped a bad message total=%d: %s", bad_messages.count, error)
    return True
