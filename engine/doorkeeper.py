"""Who may connect to the encrypted sockets of this process: a list of public keys.

libzmq asks over a socket inside the process (ZAP, RFC 27) about each client that has proved that it
owns its key. A small thread of our own answers. It also counts what failed before that question:
a stranger without a key, or one who takes us for somebody else. `api/engine_client.py` has one
doorkeeper where its wires are TCP, and so has the coordinator.
"""

import logging
import threading
from collections.abc import Iterable, Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from engine import curve
from engine.curve import CurveKeys
from engine.thinning import ThinnedCount

logger = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"


class Doorkeeper:
    """Admits listed clients to the sockets of one ZeroMQ context."""

    def __init__(self) -> None:
        self._refused = ThinnedCount()
        self._allowed: set[bytes] = set()

    @property
    def num_refused(self) -> int:
        """Connections that were not let in."""
        return self._refused.count

    def allow(self, public_keys: Iterable[bytes]) -> None:
        """Admit the owners of these keys from now on. From any thread, at any time: who was refused
        before tries again after `HANDSHAKE_TIMEOUT_S`."""
        self._allowed.update(public_keys)

    def guard(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        sockets: Sequence["zmq.Socket[bytes]"],
        keys: CurveKeys,
    ) -> None:
        """Stand at the door of `sockets`, with the keys of this process, until `context.term()`.
        Before they are bound.

        Not until `context.destroy()`, which also leaving a `with` block of it does: that would
        close the thread's sockets under its hands.
        """
        zap = context.socket(zmq.REP)
        zap.bind(_ZAP_ADDRESS)
        monitors = [_monitor(context, socket) for socket in sockets]
        for socket in sockets:
            curve.make_server(socket, keys)
        threading.Thread(
            target=self._run, args=(zap, monitors), name="doorkeeper", daemon=True
        ).start()

    def _run(self, zap: "zmq.Socket[bytes]", monitors: Sequence["zmq.Socket[bytes]"]) -> None:
        try:
            poller = zmq.Poller()
            for socket in (zap, *monitors):
                poller.register(socket, zmq.POLLIN)
            while True:
                for socket, _ in poller.poll():
                    if socket is zap:
                        zap.send_multipart(self._answer(zap.recv_multipart()))
                    else:
                        self._take_note(socket.recv_multipart())
        except zmq.ContextTerminated:
            pass
        except Exception:
            # Nobody is let in any more, which the start deadline or the next rank will notice.
            logger.exception("the doorkeeper has failed")
        finally:
            for socket in (zap, *monitors):
                socket.close(linger=0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request_id, _, address, _, _, public_key = question
        key = z85.encode(public_key)
        if key in self._allowed:
            return [version, request_id, b"200", b"OK", b"", b""]
        self._refuse(f"the key {key.decode()} of {address.decode()} is not listed")
        # For now, that is. After 400 a client gives up for ever, and blocks whoever writes to it.
        return [version, request_id, b"300", b"not listed", b"", b""]

    def _take_note(self, event: list[bytes]) -> None:
        facts = parse_monitor_message(event)
        self._refuse(f"a client without the right keys at {facts['endpoint'].decode()}")

    def _refuse(self, reason: str) -> None:
        if self._refused.add():
            logger.warning("refused a connection total=%d: %s", self.num_refused, reason)


def _monitor(
    context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]"
) -> "zmq.Socket[bytes]":
    """A socket on which failed handshakes of `socket` are told."""
    address = f"inproc://doorkeeper-{id(socket)}"
    # Who notices first that the keys are wrong hangs up: one event where we do, one where they do.
    failed = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    socket.monitor(address, failed)
    monitor = context.socket(zmq.PAIR)
    monitor.connect(address)
    return monitor
