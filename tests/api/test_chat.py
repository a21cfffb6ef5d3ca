"""POST /v1/chat/completions, whole and streamed, with computed answers."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fake_engine import prompt_as_answer, text_as_answer
from tests.helpers.http_server import HttpServer, events, serving


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    """A server that answers "Hi!"; tests may change that."""
    shared.engine.answer = text_as_answer("Hi!")
    return shared


def rendered(server: HttpServer, **fields: Any) -> str:
    """The prompt that the engine got: with this answer, the text of the reply."""
    server.engine.answer = prompt_as_answer
    response = server.http.post("/v1/chat/completions", json={"max_tokens": 500, **fields})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


USER = {"role": "user", "content": "hello"}


def test_chat_has_openai_shape(server: HttpServer) -> None:
    """All keys that clients look for."""
    body = server.chat().json()

    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_stream_begins_with_the_role_and_has_content_after_it(server: HttpServer) -> None:
    """The role chunk alone has an empty content; deltas join to the plain answer."""
    response = server.chat(stream=True)

    chunks = events(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta.get("content") != "" for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi!"
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    assert response.text.count("[DONE]") == 1


def test_stop_string_that_never_comes_leaves_no_chunk_empty(server: HttpServer) -> None:
    """But for the role's and the last; the joined text is the same."""
    server.engine.answer = text_as_answer("a@b@@c never ending")

    chunks = events(server.chat(stream=True, stop=["@@never-there@@"]))

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(delta["content"] for delta in deltas[1:-1])
    assert "".join(delta.get("content", "") for delta in deltas) == "a@b@@c never ending"


def test_every_chunk_has_a_finish_reason_and_one_says_why(server: HttpServer) -> None:
    """For each of n indices, in its last chunk."""
    chunks = events(server.chat(stream=True, n=3))

    for index in range(3):
        of_one = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in of_one[:-1]] == [None] * (len(of_one) - 1)
        assert of_one[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"].get("content", "") for c in of_one) == "Hi!"


def test_single_choice_has_index_zero_in_all_chunks(server: HttpServer) -> None:
    """However many tokens there are."""
    server.engine.answer = text_as_answer("word " * 50)

    chunks = events(server.chat(stream=True, max_tokens=300))

    assert {c["index"] for chunk in chunks for c in chunk["choices"]} == {0}


def test_answer_may_be_as_long_as_the_model_allows(server: HttpServer) -> None:
    """No `max_tokens`: up to the model's length, not 16."""
    server.engine.answer = text_as_answer("y" * 2000)

    body = server.chat("hi").json()

    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 1000


def test_newer_name_of_max_tokens(server: HttpServer) -> None:
    """`max_completion_tokens` bounds the answer; both names with one value are fine."""
    for max_tokens in (None, 2):
        body = server.chat(max_completion_tokens=2, max_tokens=max_tokens).json()
        assert body["choices"][0]["message"]["content"] == "Hi"


def test_messages_become_the_templates_text(server: HttpServer) -> None:
    """Contents as strings and as text parts; the answer's header last."""
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }

    text = rendered(server, messages=[{"role": "system", "content": "s"}, parts])

    assert text == "<system>s<user>a\nb<assistant>"


def test_last_message_can_be_continued(server: HttpServer) -> None:
    """Without a new header, and without naming `add_generation_prompt`."""
    open_end = {"role": "assistant", "content": "The sum is"}

    text = rendered(server, messages=[USER, open_end], continue_final_message=True)

    assert text == "<user>hello<assistant>The sum is"


def test_generation_prompt_can_be_left_out(server: HttpServer) -> None:
    """As evaluators want it."""
    assert rendered(server, messages=[USER], add_generation_prompt=False) == "<user>hello"


def test_logprobs_have_the_chat_shape(server: HttpServer) -> None:
    """With bytes; without `top_logprobs` the list of alternatives is empty."""
    alone = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    with_top = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"][
        "content"
    ]

    assert [entry["token"] for entry in alone] == ["H", "i", "!", "</s>"]
    assert alone[0] == {
        "token": "H",
        "logprob": pytest.approx(-7.2),
        "bytes": [72],
        "top_logprobs": [],
    }
    assert [top["token"] for top in with_top[0]["top_logprobs"]] == ["a", "b"]


def test_bytes_of_logprobs_joined_are_the_text(server: HttpServer) -> None:
    """Also where a token is a part of a character, and so no text by itself."""
    server.engine.answer = text_as_answer("漢 🙂👩‍👩‍👧 é")

    [choice] = server.chat(logprobs=True).json()["choices"]

    *entries, end = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode() == choice["message"]["content"] == "漢 🙂👩‍👩‍👧 é"
    assert end["token"] == "</s>"


def test_streamed_logprobs_joined_are_the_plain_ones(server: HttpServer) -> None:
    """Also those of tokens whose text was held back for a stop string."""
    server.engine.answer = text_as_answer("a@@b@@c")
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "stop": ["@@c!"]}
    plain = server.chat(**fields).json()["choices"][0]

    chunks = events(server.chat(**fields, stream=True))

    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [e for part in parts if part for e in part["content"]] == plain["logprobs"]["content"]


def test_usage_chunk_equals_the_plain_answers(server: HttpServer) -> None:
    """Also with n."""
    plain = server.chat(n=2).json()["usage"]

    chunks = events(server.chat(n=2, stream=True, stream_options={"include_usage": True}))

    assert (chunks[-1]["usage"], chunks[-1]["choices"]) == (plain, [])


def test_prompt_logprobs_and_token_ids_on_request(server: HttpServer) -> None:
    """At the top of a chat's answer, as in vLLM: there is one prompt."""
    body = server.chat("x", prompt_logprobs=0, return_token_ids=True).json()

    assert bytes(body["prompt_token_ids"]).decode() == "<user>x<assistant>"
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])
    assert body["choices"][0]["token_ids"] == [*b"Hi!", 256]


def test_emoji_and_cjk_stream_as_whole_characters(server: HttpServer) -> None:
    """Each event is strict UTF-8 and JSON, whatever bytes the tokens are."""
    server.engine.answer = text_as_answer("你好 🙂👩‍👩‍👧 ok")

    response = server.chat(stream=True)

    response.content.decode("utf-8", "strict")
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
    contents = [delta.get("content", "") for delta in deltas]
    assert "".join(contents) == "你好 🙂👩‍👩‍👧 ok"
    assert not any("\ufffd" in content for content in contents)


def test_answer_names_the_model_as_asked_for(server: HttpServer) -> None:
    """By each of its served names; by the first where none was given."""
    for name, shown in (("alias", "alias"), (None, "m")):
        response = server.http.post(
            "/v1/chat/completions", json={"model": name, "messages": [USER]}
        )
        assert response.json()["model"] == shown


@pytest.mark.parametrize(("split", "num_tokens"), [(None, 4), (True, 4), (False, 1)])
def test_special_token_in_a_message_is_text_unless_asked_otherwise(
    server: HttpServer, split: bool | None, num_tokens: int
) -> None:
    """`</s>` is four bytes here, or the end token where `split_special_tokens` is false."""
    plain = server.chat("x").json()["usage"]["prompt_tokens"]

    usage = server.chat("x</s>", split_special_tokens=split).json()["usage"]

    assert usage["prompt_tokens"] - plain == num_tokens
