"""The client of chat, complete and run-batch: what it understands, what it says if it cannot."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from cluster.api_client import AnswerError, ApiClient, Event, error_message
from engine.errors import ConfigError
from tests.helpers.canned_http import canned_server, chunk, stream
from tests.helpers.http_server import serving

T = TypeVar("T")

NO_PORT = 1
"""Nobody listens there."""


def ask(base_url: str, call: Callable[[ApiClient], Awaitable[T]]) -> T:
    async def run() -> T:
        client = ApiClient(base_url)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def events(port: int) -> list[Event]:
    async def read(client: ApiClient) -> list[Event]:
        return [event async for event in client.stream("/v1/completions", {"prompt": "x"})]

    return ask(f"http://127.0.0.1:{port}", read)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_in_its_version(ending: str) -> None:
    """OpenAI's clients want it, and vLLM's do."""
    with serving() as server:
        url = f"http://127.0.0.1:{server.port}{ending}"
        assert ask(url, ApiClient.first_model) == "m"
        assert ask(url, ApiClient.is_ready)


def test_no_server_is_a_mistake_that_says_what_to_do() -> None:
    """In one line, with the address and the reason."""
    with pytest.raises(ConfigError) as caught:
        ask(f"http://127.0.0.1:{NO_PORT}", ApiClient.first_model)

    assert str(caught.value) == (
        "no server answers at http://127.0.0.1:1 (Connection refused); start one with"
        " `raywire serve MODEL` or name another one with --url"
    )
    assert not ask(f"http://127.0.0.1:{NO_PORT}", ApiClient.is_ready)


def test_events_may_come_in_any_pieces() -> None:
    """TCP and chunks cut where they like, inside of a letter too."""
    texts = ["a", "é", "\n"]
    lines = [
        f"data: {json.dumps({'choices': [{'text': each}]}, ensure_ascii=False)}\n\n".encode()
        for each in texts
    ]
    pieces = [chunk(bytes([byte])) for byte in b": hello\n\n" + b"".join(lines)]
    head = stream()[0]
    with canned_server([head, b"".join(pieces[:60]), b"".join(pieces[60:]), chunk(b"")]) as server:
        assert "".join(event.text for event in events(server.port)) == "aé\n"


def test_a_chats_deltas_are_text_or_thought() -> None:
    """By either name that servers give to thoughts."""
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "h"},
        {"reasoning_content": "m"},
        {"content": "a"},
    ]
    with canned_server(
        stream(*[json.dumps({"choices": [{"delta": each}]}) for each in deltas])
    ) as server:
        found = events(server.port)

    assert [event.text for event in found] == ["", "", "", "a"]
    assert [event.reasoning for event in found] == ["", "h", "m", ""]


def test_an_error_in_a_stream_ends_it() -> None:
    """With the server's words."""
    with canned_server(stream('{"error": {"message": "the engine has died"}}')) as server:
        with pytest.raises(AnswerError, match=r"^the engine has died$"):
            events(server.port)


def test_an_answer_that_is_cut_off_is_an_error() -> None:
    """And not the whole answer."""

    async def read(client: ApiClient) -> None:
        async for _ in client.stream("/v1/completions", {}):
            server.stop()

    with canned_server(stream('{"choices": []}', ends=False)[:2]) as server:
        with pytest.raises(AnswerError, match="does not answer"):
            ask(f"http://127.0.0.1:{server.port}", read)


def test_a_refusal_is_one_line() -> None:
    """OpenAI's message, or the beginning of whatever there is."""
    assert (
        error_message(404, b'{"error": {"message": "no\\n such  model"}}')
        == "HTTP 404: no such model"
    )
    assert error_message(502, b"<html>\xff" + b"x" * 9999) == f"HTTP 502: <html>\ufffd{'x' * 493}"
