"""How a response ends, whatever ends it."""

import pytest

from api import errors
from api.generate import Generation
from api.responses.form import ResponseFormat
from api.responses.protocol import ResponsesBody
from api.responses.request import check, new_response
from api.responses.store import StoredResponse
from api.sampling_defaults import SamplingDefaults
from engine.errors import (
    EngineDeadError,
    InvalidRequestError,
    RaywireError,
    RequestFailedError,
    UnavailableError,
)
from tests.helpers.responses import events


def make(kept: list[StoredResponse]) -> ResponseFormat:
    request = check(ResponsesBody(), SamplingDefaults())
    response = new_response(request, "resp_1", "m", is_kept=True)
    return ResponseFormat(
        response, [], Generation(), None, kept.append, lambda token_id: 1, has_events=True
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RequestFailedError("it broke"), "server_error", "it broke"),
        (UnavailableError("shutting down"), "server_error", "shutting down"),
        (EngineDeadError(0, "pid 7 was killed"), "server_error", "the engine has died"),
        (InvalidRequestError("no such schema", "text"), "invalid_prompt", "no such schema"),
    ],
)
def test_failures_say_whose_they_are(error: RaywireError, code: str, words: str) -> None:
    """In one of the codes that OpenAI's client knows; and nothing that is the operator's."""
    kept: list[StoredResponse] = []
    form = make(kept)

    found = events(form.failed(errors.describe(error)).decode())

    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    failure = found[-1]["response"]["error"]
    assert failure["code"] == code
    assert words in failure["message"]
    assert "pid" not in failure["message"]
    assert [each.can_go_on for each in kept] == [False]


def test_a_client_that_has_gone_leaves_nothing() -> None:
    """Its response is not kept, and nothing more is written."""
    kept: list[StoredResponse] = []
    form = make(kept)

    assert form.last_chunks() == b""
    assert kept == []
