"""Wires that an engine core's node does not reach are told before it loads anything."""

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import zmq

from cluster.addresses import wire_config
from cluster.wire_reach import check_reach
from engine import sockets
from engine.bound import ServerWires
from engine.curve import CurveKeys
from engine.doorkeeper import Doorkeeper
from engine.errors import ConfigError
from tests.helpers.server import wait_for
from tests.helpers.wires import free_port, tcp_wires

pytestmark = pytest.mark.row("F-21")

NODE = "bb (10.77.0.2)"


@pytest.fixture
def wires() -> Iterator[ServerWires]:
    found = tcp_wires()
    yield found
    found.close()


def test_a_server_that_has_yet_to_greet_is_reached(wires: ServerWires) -> None:
    """Its port listens from the start, and a core does not wait for more."""
    check_reach(wire_config([wires]), CurveKeys.generate(), NODE)


def test_nobody_is_counted_as_a_stranger_for_it(wires: ServerWires) -> None:
    """The connection ends after the greeting, in order."""
    keys, doorkeeper = CurveKeys.generate(), Doorkeeper()
    doorkeeper.allow([keys.public])
    assert wires.keys is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = sockets.make_socket(context, zmq.PULL)
    doorkeeper.guard(context, [socket], wires.keys)
    wires.output.serve(socket)
    before = set(threading.enumerate())
    try:
        check_reach(wire_config([wires]), keys, NODE)
        wait_for(lambda: set(threading.enumerate()) <= before, "the end of the connection")
        assert doorkeeper.num_refused == 0
    finally:
        socket.close()
        context.term()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_addresses_are_told_where_nothing_answers(wires: ServerWires, host: str) -> None:
    """And what to change."""
    port = free_port()
    shown = f"tcp://{'[::1]' if ':' in host else host}:{port}"
    wire = dataclasses.replace(wire_config([wires]), output_addresses=(shown,))

    with pytest.raises(ConfigError) as refused:
        check_reach(wire, CurveKeys.generate(), NODE, timeout_s=0.2)
    assert str(refused.value) == (
        f"node {NODE} cannot reach the command's wires at {shown} within 0.2 s: Ray uses {host} for"
        " the command's node; start Ray there with a --node-ip-address that all nodes reach, and"
        " let them through to --wire-port-range"
    )
