"""What the connections of one API server share: how many there may be, how long a client may take
to read, and how many were ended by us. Used by `connection`; `service` publishes the counts.
"""

import logging
import os
import resource
from dataclasses import dataclass, field
from pathlib import Path

from api.limits import MAX_CONNECTIONS, SEND_TIMEOUT_S
from engine.thinning import ThinnedCount

logger = logging.getLogger(__name__)

_SPARE_FILES = 64
"""For what is no connection: the wires, files that are read, connections about to be refused."""

_FILES_PER_ENGINE = 8


_REASONS = ("bad_http", "too_large", "timeout", "connections", "send_timeout")


@dataclass(slots=True)
class ConnectionBook:
    """One for each API server."""

    max_connections: int = MAX_CONNECTIONS
    send_timeout_s: float = SEND_TIMEOUT_S
    ended: dict[str, ThinnedCount] = field(
        default_factory=lambda: {reason: ThinnedCount() for reason in _REASONS}
    )
    """Connections that we have ended, by the reason."""

    def count(self, reason: str, client: tuple[str, int] | None, message: str) -> None:
        """One more has been ended, for one of `_REASONS`. The log has number 1, 2, 4, 8, …"""
        ended = self.ended[reason]
        if ended.add():
            logger.warning(
                "ended a connection reason=%s num_ended=%d client=%s: %s",
                reason,
                ended.count,
                client and client[0],
                message,
            )

    def counts(self) -> dict[str, int]:
        """By reason, so far."""
        return {reason: ended.count for reason, ended in self.ended.items()}


def open_book(send_timeout_s: float, num_engines: int) -> ConnectionBook:
    """The book of this process, with as many connections as its files allow. Raises the process's
    limit of open files to what the system lets it have; warns where that is less than
    `MAX_CONNECTIONS` needs.

    Args:
        send_timeout_s: how long a client may take to read.
        num_engines: engine cores, to which there are sockets as well.
    """
    reserved = _num_open_files() + _SPARE_FILES + _FILES_PER_ENGINE * num_engines
    num_files = _raise_file_limit(reserved + MAX_CONNECTIONS)
    most = min(MAX_CONNECTIONS, max(1, num_files - reserved))
    if most < MAX_CONNECTIONS:
        logger.warning(
            "at most %d connections at a time, because this process may open %d files; `ulimit -n"
            " %d` before the start allows %d",
            most,
            num_files,
            reserved + MAX_CONNECTIONS,
            MAX_CONNECTIONS,
        )
    return ConnectionBook(most, send_timeout_s)


def _num_open_files() -> int:
    try:
        return len(os.listdir(Path("/proc/self/fd")))
    except OSError:
        return _SPARE_FILES


def _raise_file_limit(wanted: int) -> int:
    """Returns the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    except (OSError, ValueError):
        return soft
    return max(soft, most)
