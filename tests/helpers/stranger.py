"""A stranger who connects to every port he finds, with every kind of ZeroMQ socket and without
ZeroMQ, says what comes to his mind, and reads nothing until he is asked what he has heard.

    python -m tests.helpers.stranger HOST PUBLIC_KEY PORT…

He knows the servers' public key, which is no secret. `Stranger` is for tests in one process; as a
process of its own he prints a line once he has knocked everywhere, and what he has heard, as JSON,
when his standard input ends.
"""

import contextlib
import json
import random
import select
import socket as net
import sys
from collections.abc import Sequence

import zmq

KINDS = (
    *(zmq.PAIR, zmq.PUB, zmq.SUB, zmq.REQ, zmq.REP, zmq.DEALER, zmq.ROUTER, zmq.PULL, zmq.PUSH),
    *(zmq.XPUB, zmq.XSUB),
)
GREETING_BYTES = 64
"""What ZeroMQ says to everybody: its version, and that it wants CURVE."""

_NUM_RAW = 8
"""Plain connections to each port: some silent, some that talk."""


class Stranger:
    """Connects at once, to ports of one host."""

    def __init__(self, host: str, ports: Sequence[int], public_key: bytes, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [
            self._knock(kind, f"tcp://{host}:{port}", mechanism, public_key)
            for port in ports
            for kind in KINDS
            for mechanism in ("NULL", "PLAIN", "CURVE")
        ]
        self._raw = [net.create_connection((host, port)) for port in ports for _ in range(_NUM_RAW)]
        for number, connection in enumerate(self._raw):
            connection.setblocking(False)
            if number % 2:
                with contextlib.suppress(OSError):
                    connection.send(self._rng.randbytes(1 << 16))

    def heard(self) -> dict[str, int]:
        """Messages through ZeroMQ, and the most that came over a plain connection."""
        num_messages = num_bytes = 0
        for socket in self._sockets:
            with contextlib.suppress(zmq.ZMQError):  # those that cannot receive
                while socket.poll(0):
                    socket.recv_multipart(zmq.NOBLOCK)
                    num_messages += 1
        for connection in self._raw:
            got = 0
            with contextlib.suppress(OSError):
                while select.select([connection], [], [], 0)[0] and (piece := connection.recv(999)):
                    got += len(piece)
            num_bytes = max(num_bytes, got)
        return {"messages": num_messages, "bytes": num_bytes}

    def close(self) -> None:
        for connection in self._raw:
            connection.close()
        self._context.destroy(linger=0)

    def _knock(
        self, kind: int, address: str, mechanism: str, public_key: bytes
    ) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IDENTITY, b"\0\0\1\0\0\0") if kind in (
            zmq.DEALER,
            zmq.ROUTER,
        ) else None
        if mechanism == "PLAIN":
            socket.plain_username, socket.plain_password = b"root", b"root"
        elif mechanism == "CURVE":
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, public_key)
        if kind in (zmq.SUB, zmq.XSUB):
            socket.subscribe(b"") if kind == zmq.SUB else None
        socket.connect(address)
        for _ in range(3):
            with contextlib.suppress(zmq.ZMQError):
                words = [self._rng.randbytes(9) for _ in range(3)]
                socket.send_multipart([b"\1", *words] if kind == zmq.XSUB else words, zmq.NOBLOCK)
        return socket


def main(host: str, public_key: str, *ports: str) -> None:
    stranger = Stranger(host, [*map(int, ports)], public_key.encode())
    sys.stdout.write("knocked\n")
    sys.stdout.flush()
    sys.stdin.read()
    sys.stdout.write(json.dumps(stranger.heard()))
    stranger.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
