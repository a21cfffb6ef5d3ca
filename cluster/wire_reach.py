"""Whether this node reaches the command's wires at all. Used by `actors`, before the model loads.

Ray takes connections both ways, ours go one way: to the address that Ray uses for the command's
node. Where that is one of several, or a firewall is between, an engine core would load for minutes,
connect to nobody, and be missed at the start's deadline.
"""

import contextlib
import threading
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.config import WireConfig
from engine.curve import CurveKeys, CurveLink, make_client
from engine.errors import ConfigError
from engine.sockets import HANDSHAKE_TIMEOUT_S, allow_ipv6, make_socket

REACH_TIMEOUT_S = 10.0
"""For a connection of TCP: three attempts of the kernel's, over any network."""

_GREETED_OR_NOT = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def check_reach(
    wire: WireConfig, keys: CurveKeys, node: str, timeout_s: float = REACH_TIMEOUT_S
) -> None:
    """Connect to the first API server once, as the engine core will.

    Args:
        wire: over TCP.
        keys: of this engine core; listed or not.
        node: how messages call this node, with its address.
        timeout_s: how long a connection may take.

    Raises:
        ConfigError: nothing answers; it has both addresses, and what to change.
    """
    assert wire.curve is not None
    address = wire.output_addresses[0]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = make_socket(context, zmq.PUSH)
    monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | _GREETED_OR_NOT)
    make_client(socket, CurveLink(keys, wire.curve.server_public_keys[0]))
    allow_ipv6(socket, address)
    socket.connect(address)
    is_there = _happens(monitor, zmq.EVENT_CONNECTED, timeout_s)

    def hang_up() -> None:
        # Whoever hangs up before the greeting is counted over there as a stranger.
        if is_there:
            _happens(monitor, _GREETED_OR_NOT, 2.0 * HANDSHAKE_TIMEOUT_S)
        socket.disable_monitor()
        context.destroy(linger=0)

    # The API server may have much to do before it greets anybody.
    threading.Thread(target=hang_up, name="wire-reach", daemon=True).start()
    if not is_there:
        host = urlsplit(address).hostname
        raise ConfigError(
            f"node {node} cannot reach the command's wires at {address} within {timeout_s:g} s:"
            f" Ray uses {host} for the command's node; start Ray there with a --node-ip-address"
            " that all nodes reach, and let them through to --wire-port-range"
        )


def _happens(monitor: "zmq.Socket[bytes]", events: int, timeout_s: float) -> bool:
    """Wait for one of the events; False if it does not come in time."""
    with contextlib.suppress(zmq.ContextTerminated):
        while monitor.poll(round(timeout_s * 1000)):
            if recv_monitor_message(monitor)["event"] & events:
                return True
    return False
