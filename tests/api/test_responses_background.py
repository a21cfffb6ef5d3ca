"""Responses that run without a connection."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fake_engine import endless_answer, text_as_answer
from tests.helpers.http_server import HttpServer, serving, wait_for
from tests.helpers.responses import (
    LateFailure,
    ask,
    events,
    kinds,
    respond,
    stream,
    stream_in_two,
    text_of,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> Iterator[HttpServer]:
    shared.engine.answer = text_as_answer("Hello")
    yield shared
    shared.engine.is_paused = False
    shared.wait_idle()


def get(server: HttpServer, name: str) -> dict[str, Any]:
    response: dict[str, Any] = server.http.get(f"/v1/responses/{name}").json()
    return response


def wait_over(server: HttpServer, name: str) -> dict[str, Any]:
    """The response, once it has ended."""
    wait_for(lambda: get(server, name)["status"] != "in_progress", "the end of a response")
    return get(server, name)


def read_on(server: HttpServer, name: str, starting_after: int) -> list[dict[str, Any]]:
    query = {"stream": "true"}
    if starting_after >= 0:
        query["starting_after"] = str(starting_after)
    answer = server.http.get(f"/v1/responses/{name}", params=query)
    assert answer.status_code == 200, answer.text
    return events(answer.text, first=starting_after + 1)


def test_runs_without_a_connection(server: HttpServer) -> None:
    """The answer comes at once; the response when it is ready."""
    server.engine.is_paused = True
    begun = ask(server, background=True)
    assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
    assert get(server, begun["id"]) == begun
    server.engine.is_paused = False

    response = wait_over(server, begun["id"])

    assert (response["status"], text_of(response)) == ("completed", "Hello")
    assert response["usage"]["output_tokens"] == 6
    assert ask(server, previous_response_id=begun["id"])["status"] == "completed"


def test_what_still_runs_cannot_go_on(server: HttpServer) -> None:
    """Nor does it take a place in the list of those that are kept."""
    server.engine.is_paused = True
    begun = ask(server, background=True)

    answer = respond(server, previous_response_id=begun["id"])

    assert answer.status_code == 400
    assert "still in progress" in answer.json()["error"]["message"]
    items = server.http.get(f"/v1/responses/{begun['id']}/input_items").json()
    assert [item["role"] for item in items["data"]] == ["user"]


def test_cancelling_ends_it_and_keeps_what_there_is(server: HttpServer) -> None:
    """Once or twice, with the same answer; the engine hears of it."""
    server.engine.answer = endless_answer
    server.engine.step_s = 0.001
    begun = ask(server, background=True, stream=False)
    wait_for(lambda: server.engine.num_steps > 20, "some tokens")

    answers = [server.http.post(f"/v1/responses/{begun['id']}/cancel") for _ in range(2)]
    server.wait_idle()

    first, second = (answer.json() for answer in answers)
    assert first == second == get(server, begun["id"])
    assert first["status"] == "cancelled"
    assert respond(server, previous_response_id=begun["id"]).status_code == 400
    server.engine.step_s = 0.0


def test_cancelling_what_is_over_changes_nothing(server: HttpServer) -> None:
    """It answers with the response."""
    name = ask(server, background=True)["id"]
    response = wait_over(server, name)

    assert server.http.post(f"/v1/responses/{name}/cancel").json() == response


def test_deleting_what_runs_ends_it(server: HttpServer) -> None:
    """And nothing of it comes back."""
    server.engine.answer = endless_answer
    name = ask(server, background=True)["id"]

    assert server.http.delete(f"/v1/responses/{name}").json()["deleted"]

    server.wait_idle()
    assert server.http.get(f"/v1/responses/{name}").status_code == 404


def test_a_lost_stream_is_read_on_from_where_it_was(server: HttpServer) -> None:
    """While it runs, and when it is over: no event is lost, none comes twice."""
    server.engine.is_paused = True
    body = {"model": "m", "input": "hi", "background": True, "stream": True}
    with server.http.stream("POST", "/v1/responses", json=body) as answer:
        begun = events(next(answer.iter_text()))
    name = begun[0]["response"]["id"]
    server.engine.is_paused = False

    rest = read_on(server, name, begun[-1]["sequence_number"])

    assert kinds(begun) == ["created", "in_progress"]
    assert kinds(rest)[0] == "output_item.added"
    assert rest[-1]["type"] == "response.completed"
    assert rest[-1]["response"] == get(server, name)
    again = read_on(server, name, -1)
    assert again[2:] == rest
    assert read_on(server, name, again[-2]["sequence_number"]) == again[-1:]


def test_a_stream_to_its_end_is_like_any_other(server: HttpServer) -> None:
    """The same events, but for ids and times."""
    plain = stream(server)

    found = stream(server, background=True)

    assert kinds(found) == kinds(plain)
    assert text_of(found[-1]["response"]) == text_of(plain[-1]["response"])


def test_a_cancelled_stream_ends(server: HttpServer) -> None:
    """With an event that has the response."""
    server.engine.answer = endless_answer
    server.engine.step_s = 0.001

    def cancel(name: str) -> None:
        server.http.post(f"/v1/responses/{name}/cancel")

    last = stream_in_two(server, cancel, background=True)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["output"][0]["status"] == "incomplete"
    server.engine.step_s = 0.0


def test_a_failure_is_the_responses(server: HttpServer) -> None:
    """The request was answered long ago."""
    server.engine.answer = failure = LateFailure("H")

    last = stream_in_two(server, failure.fail, background=True)[-1]

    response = get(server, last["response"]["id"])
    assert (last["type"], last["response"]) == ("response.failed", response)

    assert response["status"] == "failed"
    assert response["error"]["message"] == "the computed answer says so"
    assert text_of(response) == "H"


def test_mistakes_are_told_at_once(server: HttpServer) -> None:
    """Those too that only the tokenizer finds."""
    answer = respond(server, input="x" * 2000, background=True)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"stream": "maybe"}, "stream"),
        ({"starting_after": "1"}, "starting_after"),
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
        ({"stream": "true"}, "stream"),
    ],
)
def test_bad_queries_name_the_parameter(
    server: HttpServer, query: dict[str, str], param: str
) -> None:
    """The last one is of a response that was not streamed to begin with."""
    name = ask(server, background=True)["id"]

    answer = server.http.get(f"/v1/responses/{name}", params=query)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_stop_ends_it_too() -> None:
    """The server does not wait for what nobody can fetch any more."""
    with serving(endless_answer, engine_options={"step_s": 0.005}) as server:
        ask(server, background=True)

        server.stop.set()

        assert server.join() == 0
        assert server.engine.failure is None
