"""The HTTP port."""

import collections
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.http_socket import listen, listen_group, url
from engine.errors import ConfigError


@contextlib.contextmanager
def listening(host: str, port: int, count: int = 1) -> Iterator[list[socket.socket]]:
    sockets = listen_group(host, port, count)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def test_a_port_in_use_is_refused_by_number() -> None:
    """Also by a socket that listens but has not accepted anything."""
    with listening("127.0.0.1", 0) as [first]:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_refused() -> None:
    """With the address in the message."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 .* another --host"):
        listen("192.0.2.1", 0)


def test_a_name_that_does_not_resolve_is_refused() -> None:
    """A host name's failure is a line too, not a traceback."""
    with pytest.raises(ConfigError, match=r"cannot listen on no-such-host\.invalid .* --host"):
        listen("no-such-host.invalid", 0)


def test_ipv6() -> None:
    """An address with colons binds to IPv6."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with listening("::1", 0) as [http_socket]:
        assert http_socket.family == socket.AF_INET6


def test_several_sockets_share_a_port_and_its_connections() -> None:
    """Each gets a fair part of many connections."""
    with listening("127.0.0.1", 0, count=3) as sockets:
        address = sockets[0].getsockname()
        assert {each.getsockname() for each in sockets} == {address}
        clients = [socket.create_connection(address) for _ in range(60)]
        counts: collections.Counter[int] = collections.Counter()
        for index, each in enumerate(sockets):
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    each.accept()[0].close()
                    counts[index] += 1
        for client in clients:
            client.close()
    assert counts.total() == 60
    assert min(counts[index] for index in range(3)) >= 5


def test_a_second_server_cannot_join_the_port() -> None:
    """Sharing is for one server's own sockets: a second one, with several too, is refused."""
    with listening("127.0.0.1", 0, count=2) as sockets:
        port = sockets[0].getsockname()[1]
        for count in (1, 2):
            with pytest.raises(ConfigError, match="Address already in use"):
                listen_group("127.0.0.1", port, count)


@pytest.mark.parametrize(
    ("host", "node_address", "shown"),
    [
        ("0.0.0.0", "10.0.0.7", "http://10.0.0.7:8000"),
        ("::", "fd00::7", "http://[fd00::7]:8000"),
        ("0.0.0.0", None, "http://localhost:8000"),
        ("127.0.0.1", "10.0.0.7", "http://127.0.0.1:8000"),
    ],
)
def test_a_url_is_where_clients_find_the_server(
    host: str, node_address: str | None, shown: str
) -> None:
    """A wildcard stands for the node's address, and that of IPv6 has brackets."""
    assert url(host, 8000, node_address) == shown
