"""/v1/responses of a real server with several API servers: what is kept, and by whom."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.helpers.server import Server, running_server

pytestmark = pytest.mark.slow

_ATTEMPTS = 100
"""Connections are spread by a hash: that all of so many reach one of two does not happen."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The echo, behind two API servers."""
    flags = ("--api-server-count", "2", "--served-model-name", "m")
    with running_server("scripted", *flags) as it:
        yield it


def test_a_connection_keeps_its_conversation(server: Server) -> None:
    """One client, one connection, one API server."""
    with openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0) as client:
        name = None
        for turn in range(3):
            response = client.responses.create(
                model="m", input=f"turn {turn}", previous_response_id=name
            )
            name = response.id
            assert client.responses.retrieve(name) == response
        items = list(client.responses.input_items.list(name or ""))
        assert len(items) == 5


def test_another_api_server_says_whose_it_is(server: Server) -> None:
    """A new connection may reach the other one: that is a 404 that names the cause and a way
    out, and neither a failure nor another conversation."""
    with httpx.Client(base_url=server.url) as client:
        body = {"model": "m", "input": "hi"}
        name = client.post("/v1/responses", json=body).json()["id"]
    statuses: set[int] = set()
    for _ in range(_ATTEMPTS):
        answer = httpx.post(
            f"{server.url}/v1/responses", json={**body, "previous_response_id": name}
        )
        statuses.add(answer.status_code)
        if answer.status_code == 404:
            error = answer.json()["error"]
            assert error["code"] == "previous_response_not_found"
            assert "--api-server-count 1" in error["message"]
        if statuses == {200, 404}:
            break
    assert statuses == {200, 404}
