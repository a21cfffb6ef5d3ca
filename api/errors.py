"""HTTP status and body of each of our errors, in the shape of the API that the path belongs to:

    {"error": {"message": "…", "type": "invalid_request_error", "param": "top_p", "code": null}}
    {"type": "error", "error": {"type": "invalid_request_error", "message": "…"}, "request_id": "…"}

The second is Anthropic's, everywhere below /v1/messages; the first, OpenAI's, is everybody else's.
Used by routes, the edge and server-sent events. What clients see comes from the messages of
`RequestError`, which hold nothing but the request's own values, and from the sentences below:
never a path, an address or a traceback.
"""

import re
from http import HTTPStatus

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine import log
from engine.errors import (
    ContextLengthError,
    EngineDeadError,
    RaywireError,
    RequestError,
    RequestFailedError,
    UnavailableError,
)

DEAD_RETRY_AFTER_S = 5


class ErrorDetails(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetails


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: AnthropicErrorDetails
    request_id: str | None


_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")

_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HttpError(RequestError):
    """The request is wrong in a way that has a status of its own: 404, 405, 413, 415."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, param)
        self.status = status
        self.code = code
        self.headers = headers or {}


class Failure(msgspec.Struct, frozen=True):
    """An error as HTTP shows it."""

    status: int
    details: ErrorDetails
    headers: dict[str, str] = {}
    anthropic_message: str | None = None
    """In the words that clients of that API look for, where there are such."""

    @property
    def openai_body(self) -> ErrorBody:
        return ErrorBody(self.details)

    @property
    def anthropic_body(self) -> AnthropicErrorBody:
        """It has no place for the field but the message."""
        message = self.anthropic_message or self.details.message
        param = None if self.anthropic_message else self.details.param
        if param is not None and param not in message:
            message = f"{param}: {message}"
        other = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return AnthropicErrorBody(AnthropicErrorDetails(kind, message), log.request_id.get())

    def body(self, path: str) -> bytes:
        """In the shape that clients of a path expect."""
        return msgspec.json.encode(self.anthropic_body if is_anthropic(path) else self.openai_body)


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def describe(error: RaywireError) -> Failure:
    """What a client is told about an error."""
    match error:
        case HttpError():
            return request_failure(error.status, str(error), error.param, error.code, error.headers)
        case ContextLengthError():
            failure = request_failure(error.status, str(error), error.param, error.code)
            return msgspec.structs.replace(failure, anthropic_message=_too_long(error))
        case RequestError():
            return request_failure(error.status, str(error), error.param, error.code)
        case EngineDeadError():
            # The cause is the operator's: it names processes.
            return server_failure(
                503,
                "the engine has died; the server is stopping",
                "engine_dead",
                retry_after_s=DEAD_RETRY_AFTER_S,
            )
        case UnavailableError():
            return server_failure(503, str(error), error.code, error.retry_after_s)
        case RequestFailedError():
            return server_failure(500, str(error), "request_failed")
        case _:
            return internal_failure()


def _too_long(error: ContextLengthError) -> str:
    if error.lengths is None:
        return f"prompt is too long: {error}"
    num_tokens, most = error.lengths
    return f"prompt is too long: {num_tokens} tokens > {most} maximum"


def request_failure(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Failure:
    """The caller's fault."""
    details = ErrorDetails(_told(message), "invalid_request_error", param, code)
    return Failure(status, details, headers or {})


def routing_failure(status: int, path: str, method: str, headers: dict[str, str]) -> Failure:
    """No such route, or not with this method."""
    if status == HTTPStatus.NOT_FOUND:
        return request_failure(status, f"no route {path[:200]}", code="not_found")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{method} is not allowed here"
        return request_failure(status, message, code="method_not_allowed", headers=headers)
    return request_failure(status, HTTPStatus(status).phrase, headers=headers)


def server_failure(
    status: int, message: str, code: str | None, retry_after_s: int | None = None
) -> Failure:
    """Ours."""
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return Failure(status, ErrorDetails(_told(message), "server_error", None, code), headers)


def _told(message: str) -> str:
    """What a client is told: an exception of a template or a library may show where in memory
    something lies, which is half of an attack."""
    return _ADDRESS.sub("0x…", message) if "0x" in message else message


def internal_failure() -> Failure:
    """Ours, and nobody foresaw it: the traceback is in the log."""
    return server_failure(500, "the server failed to answer this request", "internal_error")


class ErrorResponse(Response):
    """An error as a response, wherever it comes from: the shape is chosen when it is sent."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(None, failure.status, failure.headers)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._failure
        body = failure.body(scope["path"])
        response = Response(body, failure.status, failure.headers, "application/json")
        await response(scope, receive, send)


def error_response(failure: Failure) -> Response:
    return ErrorResponse(failure)
