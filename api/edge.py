"""What every request passes before it reaches a route, and every response on its way out.

    path, request id -> CORS -> gate (starting, draining, dead) -> routes
    access log <- request id, connection <- CORS <---------------'

Plain ASGI wrappers around the application: they also see requests that match no route.
"""

import http
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors
from api.ids import is_safe, new_id
from api.service import Service
from engine import log
from engine.errors import EngineDeadError, RaywireError, UnavailableError

logger = logging.getLogger(__name__)

PROBES = frozenset({"/live", "/ready", "/health", "/ping"})
QUIET = PROBES | {"/metrics", "/load"}
"""Never in the access log: they come every few seconds, for ever."""

STARTING_RETRY_AFTER_S = 2
DRAINING_RETRY_AFTER_S = 5


class Edge:
    """The outermost application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "only HTTP is served"
        scope = _with_own_path(scope, self._service.config.root_path)
        exchange = _Exchange(scope, receive, send, self._service)
        token = log.request_id.set(exchange.request_id)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.end()
            log.request_id.reset(token)


class Gate:
    """Lets requests through to the routes while the server serves.

    Args:
        app: the routes.
        service: of this API server.
        generating: method and path of those that give engine cores work. Beyond the limit they are
            refused here, before anything of their bodies is read.
    """

    def __init__(
        self, app: ASGIApp, service: Service, generating: Collection[tuple[str, str]]
    ) -> None:
        self._app = app
        self._service = service
        self._generating = frozenset(generating)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, refusal = self._app, self._refusal(scope["path"], scope["method"])
        if refusal is not None:
            app = errors.error_response(errors.describe(refusal))
        await app(scope, receive, send)

    def _refusal(self, path: str, method: str) -> RaywireError | None:
        """Why no route may answer now, if so. Probes answer for themselves."""
        if path in PROBES:
            return None
        match self._service.state:
            case "starting":
                return UnavailableError("the model is loading", STARTING_RETRY_AFTER_S)
            case "hung" | "dead":
                death = self._service.client.death
                assert death is not None
                # The last metrics before the end are the interesting ones.
                return None if path == "/metrics" else EngineDeadError(*death.args)
            case "draining" if method not in ("GET", "HEAD", "OPTIONS"):
                return UnavailableError("the server is shutting down", DRAINING_RETRY_AFTER_S)
        if (method, path) in self._generating:
            return self._service.admission.refusal()
        return None


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, service: Service) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._service = service
        self._is_quiet = scope["path"] in QUIET
        self._is_counted = False
        self._began_at = time.monotonic()
        self._status = 499  # nobody was there to be answered, as nginx has it
        self.request_id = request_id(scope)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._count()
        return message

    def _count(self) -> None:
        """From here on a drain waits for the answer. Not earlier: a body that does not come would
        hold it up."""
        if not self._is_counted and not self._is_quiet:
            self._is_counted = True
            self._service.num_active += 1

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            named = id_headers(self._scope["path"], self.request_id).items()
            message["headers"] = [
                *message.get("headers", ()),
                *((name.encode(), value.encode()) for name, value in named),
            ]
            if self._service.state not in ("starting", "serving"):
                # Later requests should not be tied to a server that is about to go.
                message["headers"].append((b"connection", b"close"))
        await self._send(message)

    def end(self) -> None:
        """The response is out, or nobody is there for it."""
        self._service.num_active -= self._is_counted
        if self._service.config.access_log and not self._is_quiet:
            log_access(self._scope, self._status, time.monotonic() - self._began_at)


def log_access(scope: Mapping[str, Any], status: int, took_s: float) -> None:
    """The line of one request. Its id is in the log's context."""
    logger.info(
        '"%s %s" %d %s %.0f ms',
        scope["method"],
        scope["path"][:200].encode("unicode_escape").decode(),
        status,
        _phrase(status),
        1000 * took_s,
    )


def log_more_refused(count: int) -> None:
    """The line of requests that have none of their own."""
    logger.info("%d more requests were refused within a second", count)


def id_headers(path: str, request_id: str) -> dict[str, str]:
    """The headers by which a client learns the id of its request."""
    if errors.is_anthropic(path):  # the name that its clients know
        return {"x-request-id": request_id, "request-id": request_id}
    return {"x-request-id": request_id}


def _with_own_path(scope: Scope, root_path: str) -> Scope:
    """The request as routes know it: without the prefix of a proxy, and without a slash at the end.
    A redirect would name a host that clients behind a proxy cannot reach."""
    given = path = scope["path"]
    if root_path and (path == root_path or path.startswith(f"{root_path}/")):
        path = path[len(root_path) :]
    if path.endswith("/") or not path:
        path = path.rstrip("/") or "/"
    return scope if path is given else {**scope, "path": path}


def request_id(scope: Mapping[str, Any]) -> str:
    """The client's own id, if it is harmless, else a new one: it goes into headers and logs."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and is_safe(given := str(value, "latin-1")):
            return given
    return new_id(num_bits=128)


def _phrase(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "client closed"
