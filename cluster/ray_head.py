"""Says so when the head of the Ray cluster is gone, and when it is back. Used by `ray_lease`.

Tokens need no head, so a server goes on without; but nothing can be placed or found any more, and
after a while Ray ends its nodes. Whoever looks after it should learn of that at once. No call of
Ray tells: each would wait for the head.
"""

import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

_INTERVAL_S = 5.0
_ANSWER_S = 2.0


def watch_head(
    address: str, wait_closed: Callable[[float], bool], interval_s: float = _INTERVAL_S
) -> None:
    """Ask the head now and then, until the server is closed. Of a thread of its own.

    Args:
        address: of the cluster's control store, `host:port`.
        wait_closed: waits so many seconds, and returns whether the server is closed.
        interval_s: between two questions.
    """
    is_there = True
    while not wait_closed(interval_s):
        was_there, is_there = is_there, _answers(address)
        if was_there and not is_there:
            logger.warning(
                "the head of the Ray cluster at %s does not answer: requests are served, but no"
                " lost rank can be replaced, and Ray ends its nodes and the engine cores on them"
                " unless it is back within RAY_gcs_rpc_server_reconnect_timeout_s (60 by default)",
                address,
            )
        elif is_there and not was_there:
            logger.warning("the head of the Ray cluster at %s answers again", address)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError:
        return False
    return True
