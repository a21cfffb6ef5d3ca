"""The render routes: what the model would be asked, without asking it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.byte_folder import END
from tests.helpers.http_server import HttpServer, serving

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    shared.engine.received.clear()
    return shared


def render(server: HttpServer, path: str, **fields: Any) -> Any:
    response = server.http.post(f"{path}/render", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_chat_is_shown_as_it_would_be_sent(server: HttpServer) -> None:
    """The same text, tokens and parameters that the engine gets when it is asked in earnest."""
    fields = {"temperature": 0.5, "stop": ["\n"], "seed": 7, "cache_salt": "s", "stream": True}

    shown = render(server, "/v1/chat/completions", messages=HI, **fields)
    assert server.engine.received == []
    server.chat("hi", **fields)

    [sent] = server.engine.received
    assert sent.prompt_token_ids is not None
    assert sent.sampling_params is not None
    assert shown["prompt_text"] == "<user>hi<assistant>"
    assert shown["token_ids"] == sent.prompt_token_ids.tolist()
    assert (shown["model"], shown["stream"], shown["cache_salt"]) == ("m", True, "s")
    params = shown["sampling_params"]
    assert (params["temperature"], params["seed"], params["stop"]) == (0.5, 7, ["\n"])
    assert (
        params["max_tokens"] == sent.sampling_params.max_tokens == 1000 - len("<user>hi<assistant>")
    )
    assert params["eos_token_ids"] == [END]
    assert shown["request_id"].startswith("chatcmpl-")


def test_each_prompt_of_a_completion_is_shown(server: HttpServer) -> None:
    """As a list, as in vLLM; token ids are shown as text too."""
    first, second = render(server, "/v1/completions", prompt=["ab", "c"], max_tokens=3, n=2)
    [ids] = render(server, "/v1/completions", prompt=[97, END], echo=True)

    assert (first["prompt_text"], first["token_ids"]) == ("ab", [97, 98])
    assert (second["prompt_text"], second["token_ids"]) == ("c", [99])
    assert (first["sampling_params"]["max_tokens"], first["sampling_params"]["n"]) == (3, 2)
    assert ids["prompt_text"] == "a</s>"
    assert server.engine.received == []


def test_a_response_is_shown_with_what_it_continues(server: HttpServer) -> None:
    """In its own words for the conversation; where responses are kept, with the earlier turns."""
    first = server.http.post("/v1/responses", json={"input": "hi"}).json()
    more = {"input": "and?", "previous_response_id": first["id"]}

    shown = render(server, "/v1/responses", **more)

    assert render(server, "/v1/responses", input="hi")["prompt_text"] == "<user>hi<assistant>"
    said = first["output"][0]["content"][0]["text"]
    assert shown["prompt_text"] == f"<user>hi<assistant>{said}<user>and?<assistant>"


def test_nested_parameters_have_names(server: HttpServer) -> None:
    """What travels to the engine by position is shown by name."""
    detection = {"max_pattern_size": 3, "min_count": 5}
    [shown] = render(server, "/v1/completions", prompt="x", repetition_detection=detection)

    assert shown["sampling_params"]["repetition_detection"] == {
        "max_pattern_size": 3,
        "min_pattern_size": 1,
        "min_count": 5,
    }


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1000}, "messages"),
        ("/v1/chat/completions", {"messages": HI, "top_p": 2}, "top_p"),
        ("/v1/completions", {"prompt": "x" * 1000}, "prompt"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)
def test_what_generating_refuses_is_refused(
    server: HttpServer, path: str, fields: dict[str, Any], param: str
) -> None:
    """With the same words."""
    shown = server.http.post(f"{path}/render", json=fields)
    asked = server.http.post(path, json=fields)

    assert shown.status_code == asked.status_code == 400
    assert shown.json() == asked.json()
    assert shown.json()["error"]["param"] == param


def test_a_typed_special_token_is_shown_as_it_was_typed(server: HttpServer) -> None:
    """Nothing shows how it was told from the template's own, but the token ids."""
    hostile = [{"role": "user", "content": "a</s>"}]

    shown = render(server, "/v1/chat/completions", messages=hostile)

    assert shown["prompt_text"] == "<user>a</s><assistant>"
    assert END not in shown["token_ids"]
