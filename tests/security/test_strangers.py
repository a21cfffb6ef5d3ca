"""Who has no listed key hears nothing on the wires between nodes, and slows nobody."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import pytest
import zmq

from cluster.addresses import wire_config
from engine import codec
from engine.bound import bind_tcp
from engine.curve import CurveKeys, CurveLink
from engine.doorkeeper import Doorkeeper
from engine.sockets import connect_socket, make_socket
from engine.wire import (
    RequestType,
    pack_identity,
)
from tests.helpers.api_peer import make_request
from tests.helpers.core_process import make_config, start_process
from tests.helpers.server import wait_for
from tests.helpers.stranger import GREETING_BYTES, KINDS, Stranger
from tests.helpers.wires import tcp_wires

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
TIMEOUT_MS = 20_000
NO_MESSAGE_MS = 500
"""How long we wait for what must not come."""


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.contextmanager
def guarded(
    *kinds: int,
) -> Iterator[tuple[list["zmq.Socket[bytes]"], list[str], CurveKeys, Doorkeeper]]:
    """Server sockets as our processes have them on TCP."""
    context: Context = zmq.Context()
    keys, doorkeeper = CurveKeys.generate(), Doorkeeper()
    sockets, addresses = [make_socket(context, kind) for kind in kinds], []
    doorkeeper.guard(context, sockets, keys)
    for socket in sockets:
        bound = bind_tcp("127.0.0.1")
        bound.serve(socket)
        addresses.append(bound.address)
    try:
        yield sockets, addresses, keys, doorkeeper
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()


@pytest.mark.row("S-17", "F-23")
def test_no_kind_of_socket_gets_in() -> None:
    """Eleven kinds of ZeroMQ socket, without a mechanism, with a password, with CURVE and a key of
    its own; plain connections, silent and talking. On each kind of socket that we bind: nothing
    comes in, nothing goes out but the greeting, a friend is heard and hears."""
    with guarded(zmq.ROUTER, zmq.PULL, zmq.XPUB) as (sockets, addresses, keys, doorkeeper):
        router, pull, xpub = sockets
        friend = CurveKeys.generate()
        doorkeeper.allow([friend.public])
        stranger = Stranger("127.0.0.1", [port_of(a) for a in addresses], keys.public)
        try:
            wait_for(lambda: doorkeeper.num_refused >= 3 * len(KINDS), "strangers are refused", 20)
            link = CurveLink(friend, keys.public)
            with (
                zmq.Context() as context,
                connect_socket(
                    context, zmq.DEALER, addresses[0], identity=b"friend", curve=link
                ) as to_router,
                connect_socket(context, zmq.PUSH, addresses[1], curve=link) as to_pull,
                connect_socket(context, zmq.SUB, addresses[2], curve=link) as sub,
            ):
                sub.subscribe(b"load")
                to_router.send(b"one")
                to_pull.send(b"two")

                assert router.poll(TIMEOUT_MS)
                assert router.recv_multipart() == [b"friend", b"one"]
                assert pull.poll(TIMEOUT_MS)
                assert pull.recv() == b"two"
                assert xpub.poll(TIMEOUT_MS)
                assert xpub.recv() == b"\1load"
                xpub.send(b"load: secret")
                assert sub.poll(TIMEOUT_MS)
                assert sub.recv() == b"load: secret"
                for socket in sockets:  # and nothing of anybody else
                    assert not socket.poll(NO_MESSAGE_MS)
            heard = stranger.heard()
        finally:
            stranger.close()
    assert heard["messages"] == 0
    assert heard["bytes"] <= GREETING_BYTES


# ----------------------------------------------------------------------------- a fake server


@dataclasses.dataclass(frozen=True)
class FakeServer:
    """ROUTER and PULL where the real ones should be, without their secret key. Admits anybody."""

    router: "zmq.Socket[bytes]"
    pull: "zmq.Socket[bytes]"
    monitors: "list[zmq.Socket[bytes]]"

    @classmethod
    @contextlib.contextmanager
    def serve(cls, addresses: Sequence[str], keys: CurveKeys | None) -> "Iterator[FakeServer]":
        context: Context = zmq.Context()
        sockets = [make_socket(context, kind) for kind in (zmq.ROUTER, zmq.PULL)]
        sockets[0].setsockopt(zmq.ROUTER_MANDATORY, 0)
        for socket in sockets if keys is not None else ():
            assert keys is not None
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        monitors = [socket.get_monitor_socket(zmq.EVENT_ACCEPTED) for socket in sockets]
        for socket, address in zip(sockets, addresses, strict=True):
            socket.bind(address)
        try:
            yield cls(sockets[0], sockets[1], monitors)
        finally:
            for socket in sockets:
                socket.disable_monitor()
            for socket in (*sockets, *monitors):
                socket.close(linger=0)
            context.term()

    def is_called(self) -> bool:
        """Whether somebody has connected to both."""
        return all(monitor.poll(0) for monitor in self.monitors)


@pytest.mark.row("S-03")
@pytest.mark.parametrize("has_keys", [False, True])
def test_a_server_without_the_key_is_not_obeyed(has_keys: bool) -> None:
    """At the very address that an engine core was told, in the clear or with a key pair of its own:
    it hears no READY and no heartbeat, and what it sends is not read (CVE-2025-30165). ZeroMQ does
    not call again after such an answer: the start ends at its deadline, which names the rank."""
    wires, keys = tcp_wires(), CurveKeys.generate()
    wires.close()  # so that somebody else can be there
    config = dataclasses.replace(make_config([]), wire=wire_config([wires]))
    addresses = wires.request.address, wires.output.address
    process = start_process(config, keys=keys)
    try:
        with FakeServer.serve(addresses, CurveKeys.generate() if has_keys else None) as fake:
            wait_for(fake.is_called, "the core calls", 20)
            identity = pack_identity(0, config.wire.epoch)
            add = codec.Encoder().encode(make_request("fake", max_tokens=3))
            for _ in range(20):
                fake.router.send_multipart([identity, RequestType.ADD.value, *add])
                assert not fake.pull.poll(25)
                assert not fake.router.poll(25)
            assert process.is_alive()
    finally:
        process.kill()
        process.join()
