"""The HTTP port: taken first, before anything slow is even imported, so that a port in use costs
nobody two seconds. Used by `cli`, which hands the sockets to `launch`.
"""

import errno
import socket

from engine.errors import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Take the HTTP port for one API server; see `listen_group`."""
    [http_socket] = listen_group(host, port, 1)
    return http_socket


def listen_group(host: str, port: int, count: int) -> list[socket.socket]:
    """Take the HTTP port; 0 is one of the kernel's choice. What connects waits until the server
    answers.

    Args:
        host: address of this machine, or a wildcard.
        port: the same for all sockets.
        count: sockets, one for each API server. The kernel spreads connections over them, by a hash
            of the client's address and port.

    Raises:
        ConfigError: the port is in use, or the address is not ours.
    """
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(_bind(host, port, is_first=not sockets))
            port = sockets[0].getsockname()[1]
        for each in sockets:
            # Two bound sockets that do not listen may share a port: listening is what takes it.
            each.listen(_BACKLOG)
    except OSError as error:
        for each in sockets:
            each.close()
        is_address = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        option = "--host, an address of this machine" if is_address else "--port"
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another"
            f" {option}"
        ) from error
    return sockets


def join_group(host: str, port: int) -> socket.socket:
    """Take part in a port of ours, once the socket listens. What came to one that has been closed
    is lost, and the kernel spreads new connections over those that listen.

    Raises:
        OSError: the port has been somebody else's for a moment.
    """
    return _bind(host, port, is_first=False)


def url(host: str, port: int, node_address: str | None = None, *, is_tls: bool = False) -> str:
    """Where clients find the server. Pure.

    Args:
        host: what it listens on; a wildcard is nobody's address.
        port: of all its sockets.
        node_address: of this node as others know it, where somebody knows.
        is_tls: whether it speaks HTTPS.
    """
    scheme = "https" if is_tls else "http"
    shown = (node_address or "localhost") if host in ("", "0.0.0.0", "::") else host
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def _bind(host: str, port: int, *, is_first: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    http_socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without it a restart would have to wait until the last server's connections are forgotten.
        # It does not let two servers share a port.
        http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not is_first:
            http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        http_socket.bind((host, port))
        # The first is bound without the option, which would let it join the port of another server;
        # with it from then on, its own brothers may join it.
        http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        http_socket.close()
        raise
    return http_socket
