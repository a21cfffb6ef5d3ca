"""Errors have the shape of the API that a path belongs to."""

import json

import pytest

from api import errors
from engine import log
from engine.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    RaywireError,
    RequestFailedError,
    UnavailableError,
)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_paths_have_anthropics_shape(path: str) -> None:
    """With the id of the request; the field is in the message, which may name it already."""
    failure = errors.describe(InvalidRequestError("must be a number", "top_p"))
    token = log.request_id.set("req-1")
    try:
        body = json.loads(failure.body(path))
    finally:
        log.request_id.reset(token)

    assert body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "top_p: must be a number"},
        "request_id": "req-1",
    }
    named = errors.describe(InvalidRequestError("top_p must be a number", "top_p"))
    assert named.anthropic_body.error.message == "top_p must be a number"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messagesx", "/", ""])
def test_all_others_have_openais(path: str) -> None:
    """Also those that only begin alike."""
    failure = errors.describe(InvalidRequestError("must be a number", "top_p"))

    assert json.loads(failure.body(path)) == {
        "error": {
            "message": "must be a number",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "invalid_value",
        }
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (NotFoundError("no", "model"), 404, "not_found_error"),
        (errors.HttpError(413, "long"), 413, "request_too_large"),
        (errors.HttpError(415, "text"), 415, "invalid_request_error"),
        (errors.HttpError(429, "many"), 429, "rate_limit_error"),
        (RequestFailedError("oh"), 500, "api_error"),
        (UnavailableError("later"), 503, "overloaded_error"),
        (EngineDeadError(0, "oh"), 503, "overloaded_error"),
    ],
)
def test_anthropics_types_follow_the_status(error: RaywireError, status: int, kind: str) -> None:
    """Its clients choose an exception by the status, and show the type."""
    failure = errors.describe(error)

    assert failure.status == status
    assert failure.anthropic_body.error.type == kind
