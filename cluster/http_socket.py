"""The HTTP port: taken first, before anything slow is even imported, so that a port in use costs
nobody two seconds. Used by `cli`, which hands the socket to `launch`.
"""

import socket

from engine.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Take the HTTP port; 0 is one of the kernel's choice. What connects waits until the server
    answers.

    Raises:
        ConfigError: the port is in use, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    http_socket = socket.socket(family, socket.SOCK_STREAM)
    # Without it a restart would have to wait until the last server's connections are forgotten. It
    # does not let two servers share a port.
    http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        http_socket.bind((host, port))
        # Two bound sockets that do not listen may share a port: listening is what takes it.
        http_socket.listen(2048)
    except OSError as error:
        http_socket.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port"
        ) from error
    return http_socket
