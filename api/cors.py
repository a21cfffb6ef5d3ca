"""CORS: which web sites' scripts may speak to this server from a browser. Unless told, none.

Around the gate and the routes, so that errors and streams have the headers as well: without them a
script learns nothing of an error, not even its status.
"""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from api import errors
from api.config import ApiConfig

EXPOSED = ("request-id", "retry-after", "x-raywire-ignored", "x-raywire-route", "x-request-id")
"""Headers of answers that scripts may read."""


_MAX_SHOWN_CHARS = 100
"""Of an origin, in an error."""


def with_cors(app: ASGIApp, config: ApiConfig) -> ASGIApp:
    """`app`, for the web sites that the settings allow."""
    if not config.allowed_origins:
        return app
    return _Cors(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED,
    )


class _Cors(CORSMiddleware):
    """Refuses in OpenAI's shape."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        origin = request_headers["origin"][:_MAX_SHOWN_CHARS]
        why = bytes(answer.body).decode()
        message = f"{why}, for scripts of {origin!r}; --allowed-origins and the like decide"
        failure = errors.request_failure(answer.status_code, message, code="cors")
        return errors.error_response(failure)
