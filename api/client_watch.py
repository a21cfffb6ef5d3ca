"""Whether the client of a request is still there.

ASGI tells it by a message that somebody has to wait for: a task for each request. Our connections
(`connection`) know it anyway, and say so to whoever asks.
"""

from collections.abc import Callable
from typing import Protocol

from starlette.requests import Request

EXTENSION = "raywire.client_watch"
"""Its name among the extensions of a request's scope."""


class ClientWatch(Protocol):
    """Knows when the client of a request goes away."""

    def start(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when it does: at once, if it has."""

    def stop(self) -> None:
        """Call nobody any more."""


def of(request: Request) -> ClientWatch:
    """The watch over the client of a request."""
    watch: ClientWatch = request.scope["extensions"][EXTENSION]
    return watch
