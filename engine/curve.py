"""Encryption of the TCP wires: key pairs, and which end of a connection a socket is.

It is ZeroMQ's own CURVE. Every process makes its pair itself or gets it from its parent on the same
node, so a secret key never leaves its node; public keys travel with the addresses. A client knows
the server's public key before it connects, so it cannot be led elsewhere. Which clients a server
admits is decided in `doorkeeper`.
"""

from dataclasses import dataclass, field

import zmq

_ZAP_DOMAIN = b"raywire"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pair of one process, as text (Z85, 40 characters each)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "CurveKeys":
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class CurveLink:
    """What a client needs for a connection to one server."""

    keys: CurveKeys
    """The client's own."""

    server_public_key: bytes


def make_server(socket: "zmq.Socket[bytes]", keys: CurveKeys) -> None:
    """Let a socket that is not bound yet accept encrypted connections only."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    # Without a doorkeeper nobody is let in. By default everybody would be.
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def make_client(socket: "zmq.Socket[bytes]", link: CurveLink) -> None:
    """Let a socket that is not connected yet connect to that server only."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, link.keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, link.keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, link.server_public_key)
