"""Responses that are kept, and conversations that go on."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.responses.items import InputText, Item, Message
from api.responses.store import ResponseStore, StoredResponse
from tests.helpers.fake_engine import endless_answer, prompt_as_answer, text_as_answer
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.responses import (
    ANSWER,
    TEMPLATE,
    WEATHER,
    LateFailure,
    ask,
    respond,
    stream,
    stream_in_two,
    text_of,
)


def item(text: str) -> Item:
    return Message("msg_1", "user", [InputText(text)])


def response(name: str, *items: Item) -> StoredResponse:
    written = Message(f"msg_of_{name}", "assistant", [])
    return StoredResponse(name, items, [written], b"{}", can_go_on=True)


# ---------------------------------------------------------------------------------------- store


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "remove"]),
            st.integers(0, 5),
            st.lists(st.integers(0, 7), max_size=4),
        ),
        max_size=30,
    ),
    st.integers(0, 4),
    st.integers(4000, 20_000),
)
def test_store_keeps_its_bounds(
    steps: list[tuple[str, int, list[int]]], max_responses: int, max_bytes: int
) -> None:
    """Whatever is kept, asked for and forgotten, and however responses share items."""
    items = [item("x" * 500 * size) for size in range(8)]
    store = ResponseStore(max_responses, max_bytes)
    for step, name, places in steps:
        match step:
            case "put":
                store.put(response(str(name), *(items[place] for place in places)))
            case "get":
                found = store.get(str(name))
                assert found is None or found.id == str(name)
            case _:
                store.remove(str(name))
                assert store.get(str(name)) is None
                assert store.find_item(f"msg_of_{name}") is None
        store.validate()


def test_what_nobody_asked_for_goes_first() -> None:
    """Reading a response makes it the last to go."""
    store = ResponseStore(2, 1 << 20)
    store.put(response("a"))
    store.put(response("b"))
    assert store.get("a") is not None

    store.put(response("c"))

    assert [name for name in "abc" if store.get(name)] == ["a", "c"]


def test_items_that_are_shared_count_once() -> None:
    """A conversation of many responses holds each text once."""
    store = ResponseStore(100, 1 << 20)
    long, conversation = 100_000, list[Item]()
    for turn in range(9):
        conversation = [*conversation, item(f"{turn}" * (long // 9))]
        store.put(response(str(turn), *conversation))

    assert long < store.num_bytes < 2 * long
    assert len(store) == 9


def test_a_response_larger_than_the_store_is_not_kept() -> None:
    """It makes room for nothing: the store is empty then, and sound."""
    store = ResponseStore(10, 10_000)
    store.put(response("small"))
    store.put(response("large", item("x" * 20_000)))

    assert len(store) == 0
    assert store.num_bytes == 0


def test_names_cannot_be_guessed_and_tell_their_origin() -> None:
    """Whoever knows one may read the response: 160 random bits, of the system's own."""
    store, other = ResponseStore(1, 1), ResponseStore(1, 1)
    names = {store.new_id() for _ in range(100)}

    assert len(names) == 100
    assert all(len(name) == len("resp_") + 8 + 40 for name in names)
    assert not any(map(store.is_foreign, names))
    assert all(map(other.is_foreign, names))


# ------------------------------------------------------------------------------------ the routes


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE, reasoning_parser="auto") as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    """A server whose model repeats its prompt; tests may change that."""
    shared.engine.answer = prompt_as_answer
    return shared


def get(server: HttpServer, path: str, **query: Any) -> Any:
    return server.http.get(f"/v1/responses/{path}", params=query)


def test_a_conversation_goes_on(server: HttpServer) -> None:
    """With all that was said, whole or streamed; instructions are each request's own."""
    server.engine.answer = text_as_answer("one")
    first = ask(server, input="1?", instructions="Count.")
    server.engine.answer = text_as_answer("two")
    second = stream(server, input="2?", previous_response_id=first["id"])[-1]["response"]
    server.engine.answer = prompt_as_answer

    third = ask(server, input="3?", previous_response_id=second["id"], instructions="Go on.")

    assert text_of(third) == (
        "<system>Go on.<user>1?<assistant>one<user>2?<assistant>two<user>3?<assistant>"
    )
    assert third["previous_response_id"] == second["id"]


def test_a_conversation_branches(server: HttpServer) -> None:
    """Each response may have several successors, and outlives those before it."""
    server.engine.answer = text_as_answer("one")
    first = ask(server, input="1?")["id"]
    left = ask(server, input="2?", previous_response_id=first)["id"]
    server.http.delete(f"/v1/responses/{first}")
    server.engine.answer = prompt_as_answer

    response = ask(server, input="3?", previous_response_id=left)

    assert text_of(response) == "<user>1?<assistant>one<user>2?<assistant>one<user>3?<assistant>"
    assert respond(server, previous_response_id=first).status_code == 404


def test_items_can_be_referred_to(server: HttpServer) -> None:
    """While the response that they are in is kept: in any conversation, in any order."""
    server.engine.answer = text_as_answer(ANSWER)
    first = ask(server, tools=[WEATHER])
    thought, message, call = (
        {"type": "item_reference", "id": item["id"]} for item in first["output"]
    )
    result = {
        "type": "function_call_output",
        "call_id": first["output"][2]["call_id"],
        "output": "rain",
    }
    items = [{"role": "user", "content": "hi"}, thought, message, call, result]
    server.engine.answer = prompt_as_answer

    seen = text_of(ask(server, input=items))
    server.http.delete(f"/v1/responses/{first['id']}")

    assert seen.startswith("<user>hi<assistant><think>Hm.</think>Let me see.<tool_call>")
    assert seen.endswith("<tool>rain<assistant>")
    missing = respond(server, input=items)
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "input[1].id"


def test_input_can_be_counted(server: HttpServer) -> None:
    """As many tokens as the response would be given; also more than the model takes."""
    first = ask(server, input="1?", tools=[WEATHER])
    fields = {"input": "2?", "previous_response_id": first["id"], "instructions": "Be brief."}

    count = server.http.post("/v1/responses/input_tokens", json={"model": "m", **fields}).json()
    second = ask(server, **fields)
    long = server.http.post("/v1/responses/input_tokens", json={"input": "x" * 3000})
    assert long.status_code == 200, long.text

    assert count == {
        "input_tokens": second["usage"]["input_tokens"],
        "object": "response.input_tokens",
    }
    assert long.json()["input_tokens"] == len("<user><assistant>") + 3000
    bad = server.http.post("/v1/responses/input_tokens", json={"model": "m"})
    assert bad.json()["error"]["param"] == "input"


def test_results_of_calls_follow_in_the_next_request(server: HttpServer) -> None:
    """The call is the store's, the result the client's."""
    server.engine.answer = text_as_answer(ANSWER)
    first = ask(server, tools=[WEATHER])
    result = {
        "type": "function_call_output",
        "call_id": first["output"][2]["call_id"],
        "output": [{"type": "input_text", "text": "rain"}],
    }
    server.engine.answer = prompt_as_answer

    seen = text_of(ask(server, input=[result], previous_response_id=first["id"]))

    assert seen.endswith("</tool_call><tool>rain<assistant>")


def test_a_response_can_be_read_again(server: HttpServer) -> None:
    """The same, to the byte, as when it ended."""
    for is_streamed in (False, True):
        response = stream(server)[-1]["response"] if is_streamed else ask(server)

        assert get(server, response["id"]).json() == response


def test_an_incomplete_response_can_go_on(server: HttpServer) -> None:
    """The text that was cut off is part of the conversation."""
    server.engine.answer = endless_answer
    first = ask(server, max_output_tokens=3)
    server.engine.answer = prompt_as_answer

    assert text_of(ask(server, input="?", previous_response_id=first["id"])) == (
        "<user>hi<assistant>abc<user>?<assistant>"
    )


def test_input_items_come_in_pages(server: HttpServer) -> None:
    """The latest first, unless asked otherwise; with all that was said before."""
    first = ask(server, input=[{"role": "user", "content": str(i)} for i in range(4)])
    second = ask(server, input="4", previous_response_id=first["id"])
    path = f"{second['id']}/input_items"

    whole = get(server, path, order="asc").json()
    latest = get(server, path, limit=2).json()
    rest = get(server, path, limit=100, after=latest["last_id"]).json()

    assert [item["role"] for item in whole["data"]] == ["user"] * 4 + ["assistant", "user"]
    assert (whole["object"], whole["has_more"], latest["has_more"]) == ("list", False, True)
    assert latest["data"] + rest["data"] == whole["data"][::-1]
    assert (whole["first_id"], whole["last_id"]) == (
        whole["data"][0]["id"],
        whole["data"][-1]["id"],
    )


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_none"}, "after"),
    ],
)
def test_bad_pages_name_the_parameter(
    server: HttpServer, query: dict[str, str], param: str
) -> None:
    """In OpenAI's shape."""
    answer = get(server, f"{ask(server)['id']}/input_items", **query)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_response_can_be_forgotten(server: HttpServer) -> None:
    """Then nothing is left of it, and the error says why that may be."""
    name = ask(server)["id"]

    answer = server.http.delete(f"/v1/responses/{name}")

    assert answer.json() == {"id": name, "object": "response", "deleted": True}
    for method, path in (
        ("GET", name),
        ("DELETE", name),
        ("POST", f"{name}/cancel"),
        ("GET", f"{name}/input_items"),
    ):
        again = server.http.request(method, f"/v1/responses/{path}")
        assert again.status_code == 404
        assert again.json()["error"]["code"] == "response_not_found"
        assert "it was deleted" in again.json()["error"]["message"]


def test_store_false_keeps_nothing(server: HttpServer) -> None:
    """Neither whole nor streamed."""
    for response in (ask(server, store=False), stream(server, store=False)[-1]["response"]):
        assert response["store"] is False
        assert get(server, response["id"]).status_code == 404


def test_a_name_of_another_server_is_told_apart(server: HttpServer) -> None:
    """With several API servers, a new connection may reach another: the error says so."""
    foreign = ResponseStore(1, 1).new_id()

    answer = respond(server, previous_response_id=foreign)

    error = answer.json()["error"]
    assert answer.status_code == 404
    assert (error["code"], error["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    assert "--api-server-count 1" in error["message"]


def test_a_failed_response_is_kept_but_cannot_go_on(server: HttpServer) -> None:
    """It can be read: its text may be all that somebody has."""
    server.engine.answer = failure = LateFailure("H")
    response = stream_in_two(server, failure.fail)[-1]["response"]

    assert get(server, response["id"]).json() == response
    answer = respond(server, previous_response_id=response["id"])
    assert answer.status_code == 400
    assert "failed" in answer.json()["error"]["message"]


def test_only_background_responses_can_be_cancelled(server: HttpServer) -> None:
    """Or streamed afterwards."""
    name = ask(server)["id"]

    cancelled = server.http.post(f"/v1/responses/{name}/cancel")
    streamed = get(server, name, stream="true")

    assert cancelled.status_code == streamed.status_code == 400
    assert "background" in cancelled.json()["error"]["message"]
    assert streamed.json()["error"]["param"] == "stream"


def test_a_server_may_keep_nothing() -> None:
    """`--max-stored-responses 0`: what needs the store is refused by its name."""
    with serving(max_stored_responses=0) as server:
        response = ask(server)

        again = respond(server, previous_response_id=response["id"])
        background = respond(server, background=True)

        assert response["store"] is False
        assert again.status_code == 404
        assert background.status_code == 400
        for answer in (again, background):
            assert "--max-stored-responses 0" in answer.json()["error"]["message"]
