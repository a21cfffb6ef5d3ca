"""How the modules in `routes` offer their endpoints. Used by `app`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint."""

    methods: tuple[str, ...]
    path: str
    """As FastAPI has it: `/v1/models/{name:path}`."""

    endpoint: Endpoint
    is_hot: bool = False
    """Called for every token or two of work: it goes past the framework (`app.FastLane`)."""
