"""How the modules in `routes` offer their endpoints. Used by `app`."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]

Access = Literal["key", "open", "metrics", "admin"]
"""Who may use a route (`guard`)."""


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint, and what `/openapi.json` says of it."""

    methods: tuple[str, ...]
    path: str
    """As FastAPI has it: `/v1/models/{name:path}`."""

    endpoint: Endpoint
    access: Access = "key"
    """Who may use it. Unless said otherwise, who has one of the API's keys."""

    is_hot: bool = False
    """Called for every token or two of work: it goes past the framework (`app.FastLane`)."""

    generates: bool = False
    """It gives engine cores work, and is refused where they have enough (`admission`)."""

    summary: str = ""
    """What it does, in a few words."""

    body: type[msgspec.Struct] | None = None
    """Of its JSON body, where it takes one."""

    raw_fields: Mapping[str, Any] = field(default_factory=dict)
    """What the fields hold that `body` leaves raw, and the bounds of others: a type, or a JSON
    schema as a dict."""

    example: Mapping[str, Any] | None = None
    """A body that works, but for the name of the model, which is put in."""

    query: Mapping[str, Any] = field(default_factory=dict)
    """Parameters behind a `?`, by name: the type of each."""

    answer: Any = None
    """Type of its JSON answer; a union where there are several. None: no JSON."""

    event: Any = None
    """Type of the events' data, where `stream: true` asks for a stream; a union of all kinds."""

    media_type: str = "application/json"
    """Of its answer."""
