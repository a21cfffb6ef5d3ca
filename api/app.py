"""The application: routes, errors in OpenAI's shape, and the edge around them.

    request -> edge -> CORS -> gate -> fast lane -> guard -> endpoint              generating routes
                                                 -> FastAPI -> guard -> endpoint   everything else

FastAPI and Starlette wrap each call several times over, and each message of a stream. For a route
that answers in a millisecond that is a third of the work, so the generating routes, which are in
FastAPI's table like all others, are called past it.
"""

from collections.abc import Iterable, Sequence
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from api import errors
from api.cors import with_cors
from api.edge import Edge, Gate
from api.errors import HttpError
from api.front_door import FrontDoor
from api.guard import Guard
from api.routes import (
    admin,
    chaos,
    chat,
    completions,
    docs,
    health,
    invocations,
    messages,
    metrics,
    models,
    render,
    responses,
    server,
    tokens,
    unserved,
)
from api.routing import Endpoint, Route
from api.service import Service
from engine.errors import RaywireError


def build(service: Service) -> tuple[ASGIApp, FrontDoor]:
    """The whole HTTP surface of one API server, and what stands before it."""
    table = all_routes(service)
    generating = {(method, r.path) for r in table if r.generates for method in r.methods}
    app = Gate(FastLane(framework(table, service.guard), table), service, generating)
    return Edge(with_cors(app, service.config), service), FrontDoor(service, generating)


def all_routes(service: Service) -> list[Route]:
    """The table of routes, each behind the guard."""
    parts = (
        chat,
        completions,
        messages,
        responses,
        tokens,
        render,
        models,
        unserved,
        server,
        health,
        metrics,
        admin,
        chaos,
    )
    table = [route for part in parts for route in part.routes(service)]
    table += invocations.routes(service, table)
    if service.config.has_docs:
        table += docs.routes(service, table)
    return [service.guard.over(route) for route in table]


def framework(routes: Sequence[Route], guard: Guard | None = None) -> FastAPI:
    """FastAPI with all routes in its table. `guard`: asked about requests that no route takes."""
    on_routing_error = _RoutingErrors(routes, guard).answer
    app = FastAPI(
        title="raywire",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # `routes.docs` knows the structs, FastAPI only Pydantic's models
        redirect_slashes=False,
        exception_handlers={HTTPException: on_routing_error, Exception: _on_unforeseen_error},
    )
    for route in routes:
        app.add_api_route(route.path, _answering(route.endpoint), methods=_methods(route))
    return app


class FastLane:
    """Calls the hot endpoints itself, and leaves all other requests to the framework."""

    def __init__(self, framework: ASGIApp, routes: Iterable[Route]) -> None:
        self._framework = framework
        self._endpoints = {
            (method, route.path): _answering(route.endpoint)
            for route in routes
            if route.is_hot
            for method in route.methods
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._framework(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive))
        except Exception:
            await errors.error_response(errors.internal_failure())(scope, receive, send)
            raise  # to uvicorn, which logs its traceback, as it does for the framework
        await response(scope, receive, send)


def _answering(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with errors before its first byte as responses."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RaywireError as error:
            return errors.error_response(errors.describe(error))
        except ClientDisconnect:
            return Response(status_code=499)

    return answer


def _methods(route: Route) -> list[str]:
    """What can be read can be asked for without its body."""
    return sorted({*route.methods, *(["HEAD"] if "GET" in route.methods else [])})


class _RoutingErrors:
    """What requests get that no route takes: 404, or what the path's routes do take; 401 before
    that, since who has no key need not know what there is."""

    def __init__(self, routes: Iterable[Route], guard: Guard | None) -> None:
        self._guard = guard
        self._routes = [
            (route.path, compile_path(route.path)[0], _methods(route)) for route in routes
        ]

    async def answer(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if self._guard is not None:
            try:
                self._guard.check(request.scope)
            except HttpError as refusal:
                return errors.error_response(errors.describe(refusal))
        path, headers = request.url.path, dict[str, str]()
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = ", ".join(self._allowed(path))
            if request.method == "OPTIONS":
                return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)
        return errors.error_response(
            errors.routing_failure(error.status_code, path, request.method, headers)
        )

    def _allowed(self, path: str) -> list[str]:
        """Of all routes of this path, where FastAPI would name the methods of the first. One that
        has just this path hides those with a parameter in its place."""
        same = [methods for known, _, methods in self._routes if known == path]
        alike = [methods for _, pattern, methods in self._routes if pattern.match(path)]
        return sorted({"OPTIONS"}.union(*(same or alike)))


async def _on_unforeseen_error(request: Request, error: Exception) -> Response:
    return errors.error_response(errors.internal_failure())
