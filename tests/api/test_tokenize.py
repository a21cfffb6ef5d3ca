"""POST /tokenize and /detokenize: the tokens of texts and conversations, and back."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.input_processor import InputProcessor
from tests.helpers.byte_folder import END
from tests.helpers.http_server import HttpServer, serving, wait_for

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
TEMPLATE = """\
{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}{{ extra or '' }}{# <tool_call>arguments #}"""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE) as server:
        yield server
        assert server.engine.received == []  # nobody has asked it anything


def post(server: HttpServer, path: str, **fields: Any) -> httpx.Response:
    return server.http.post(path, json=fields)


def tokens(server: HttpServer, **fields: Any) -> str:
    """The tokens as text: here one is a byte."""
    response = post(server, "/tokenize", **fields)
    assert response.status_code == 200, response.text
    return bytes(response.json()["tokens"]).decode()


def test_a_text_has_vllms_shape(server: HttpServer) -> None:
    """Count, length of the model, ids; and their spelling where it is asked for."""
    body = post(server, "/tokenize", model="alias", prompt="a b").json()
    spelled = post(server, "/tokenize", prompt="a b</s>", return_token_strs=True).json()

    assert body == {
        "count": 3,
        "max_model_len": 1000,
        "tokens": [97, 32, 98],
        "token_strs": None,
    }
    assert spelled["tokens"] == [97, 32, 98, END]
    assert spelled["token_strs"] == ["a", "Ġ", "b", "</s>"]


def test_a_conversation_is_what_chat_would_send(server: HttpServer) -> None:
    """With tools and all that shapes the prompt; fields that do not are as welcome as in chat."""
    assert tokens(server, messages=HI) == "<user>hi<assistant>"
    assert tokens(server, messages=HI, add_generation_prompt=False) == "<user>hi"
    assert tokens(server, messages=HI, tools=[TOOL], temperature=0) == "[f]<user>hi<assistant>"
    assert tokens(server, messages=HI, tools=[TOOL], tool_choice="none") == "<user>hi<assistant>"
    assert tokens(server, messages=HI, chat_template_kwargs={"extra": "!"}).endswith("!")
    begun = [*HI, {"role": "assistant", "content": "so"}]
    assert tokens(server, messages=begun, continue_final_message=True) == "<user>hi<assistant>so"


def test_texts_may_be_longer_than_the_model_takes(server: HttpServer) -> None:
    """Counting is what the route is for; it ends where no model could take the text, before it is
    tokenized. Nothing has no tokens."""
    assert post(server, "/tokenize", prompt="x" * 4000).json()["count"] == 4000
    assert post(server, "/tokenize", prompt="").json()["count"] == 0
    too_long = post(server, "/tokenize", prompt="x" * 4001)
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_detokenize_shows_special_tokens(server: HttpServer) -> None:
    """What /tokenize gives comes back whole; ids that only the embedding has are nothing."""
    body = post(server, "/detokenize", model="m", tokens=[*"Köln".encode(), END, 299]).json()

    assert body == {"prompt": "Köln</s>"}
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}


@settings(max_examples=40)
@given(text=st.text())
def test_any_text_comes_back(server: HttpServer, text: str) -> None:
    """Whatever characters it has."""
    found = post(server, "/tokenize", prompt=text, add_special_tokens=False).json()

    assert post(server, "/detokenize", tokens=found["tokens"]).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "either"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt", "either"),
        ("/tokenize", {"prompt": 7}, "prompt", "expected str"),
        ("/tokenize", {"prompt": ["x"]}, "prompt", "expected str"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "bool"),
        ("/tokenize", {"messages": []}, "messages", "empty"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "text"),
        (
            "/tokenize",
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "exclude",
        ),
        ("/tokenize", {"model": "other", "prompt": "x"}, "model", "other"),
        ("/detokenize", {}, None, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens", "expected array"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]", "expected int"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]", "expected int"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", "0 to 299"),
        ("/detokenize", {"tokens": [300]}, "tokens[0]", "0 to 299"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]", "0 to 299"),
        ("/detokenize", {"tokens": [1] * ((1 << 20) + 1)}, "tokens", "1048576"),
        ("/detokenize", {"model": "other", "tokens": [1]}, "model", "other"),
    ],
)
def test_bad_requests_name_the_field(
    server: HttpServer, path: str, fields: dict[str, Any], param: str | None, words: str
) -> None:
    """In OpenAI's shape, as everywhere."""
    response = post(server, path, **fields)

    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_what_nobody_knows_is_ignored_and_said(server: HttpServer) -> None:
    """As in the routes that generate."""
    response = post(server, "/detokenize", tokens=[97], wish="x")

    assert response.headers["x-raywire-ignored"] == "wish"


def test_text_of_a_client_that_has_gone_is_not_tokenized(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its place in the queue is free for those who stay."""
    has_begun, may_end = threading.Event(), threading.Event()
    caplog.set_level("INFO", "api.edge")
    texts: list[str] = []
    tokenize = InputProcessor.tokenize

    def tokenize_slowly(self: InputProcessor, text: str, **options: Any) -> list[int]:
        texts.append(text)
        has_begun.set()
        assert may_end.wait(20)
        return tokenize(self, text, **options)

    with serving(num_text_threads=1) as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(InputProcessor, "tokenize", tokenize_slowly)
        slow = pool.submit(post, server, "/tokenize", prompt="slow")
        assert has_begun.wait(20)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"http://127.0.0.1:{server.port}/tokenize",
                json={"prompt": "gone"},
                timeout=httpx.Timeout(20, read=0.2),
            )
        wait_for(lambda: " 499 " in caplog.text, "the end of the one that has gone")
        may_end.set()
        assert slow.result(20).json()["count"] == 4
        assert post(server, "/tokenize", prompt="next").json()["count"] == 4

    assert texts == ["slow", "next"]
