"""Which endpoint answers a request. Used by `app`; the modules in `routes` make the endpoints.

A table of paths is all that is needed here. Frameworks match each path against patterns and wrap
each call several times over, which cost more than answering a short request did.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from api.asgi import App, Request
from api.errors import HttpError

Endpoint = Callable[[Request], Awaitable[App]]
"""Returns the response, which sends itself."""


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint."""

    methods: tuple[str, ...]
    path: str
    """One that ends in a slash stands for all that begin with it and are longer."""

    endpoint: Endpoint


class Routes:
    """All endpoints of an application."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, Route] = {}
        self._by_prefix: list[Route] = []
        for route in routes:
            if route.path.endswith("/"):
                self._by_prefix.append(route)
            else:
                self._exact[route.path] = route

    def find(self, method: str, path: str) -> Endpoint:
        """The endpoint for a request.

        Raises:
            HttpError: 404 where there is no such path, 405 where it is for other methods.
        """
        route = self._exact.get(path) or self._find_prefix(path)
        if route is None:
            raise HttpError(404, f"no route {path[:200]}", code="not_found")
        if method not in route.methods:
            raise HttpError(
                405,
                f"{method} is not allowed here",
                code="method_not_allowed",
                headers={"allow": ", ".join(route.methods)},
            )
        return route.endpoint

    def _find_prefix(self, path: str) -> Route | None:
        for route in self._by_prefix:
            if path.startswith(route.path) and path != route.path:
                return route
        return None
