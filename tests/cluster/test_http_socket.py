"""The HTTP port."""

import socket
from pathlib import Path

import pytest

from cluster.http_socket import listen
from engine.errors import ConfigError


def test_a_port_in_use_is_refused_by_number() -> None:
    """Also by a socket that listens but has not accepted anything."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_refused() -> None:
    """With the address in the message."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_a_name_that_does_not_resolve_is_refused() -> None:
    """A host name's failure is a line too, not a traceback."""
    with pytest.raises(ConfigError, match=r"cannot listen on no-such-host\.invalid"):
        listen("no-such-host.invalid", 0)


def test_ipv6() -> None:
    """An address with colons binds to IPv6."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with listen("::1", 0) as http_socket:
        assert http_socket.family == socket.AF_INET6
