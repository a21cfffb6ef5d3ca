"""The `openai` Python client, unmodified, against a scripted and a real model."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from api.tokenizer import Tokenizer
from tests.helpers.server import Server, running_server
from tests.helpers.streams import metric
from tests.helpers.tiny_models import clear_prompts, greedy_tokens, tiny_model


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The echo: what a request asks for is what it gets."""
    with running_server("scripted", "--served-model-name", "m", "--served-model-name", "n") as it:
        yield it


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0) as it:
        yield it


def test_lists_models(client: openai.OpenAI) -> None:
    """Every served name, and each by itself."""
    assert [model.id for model in client.models.list()] == ["m", "n"]
    assert client.models.retrieve("n").id == "n"


def test_completes(client: openai.OpenAI) -> None:
    """Text, finish reason and usage of a plain completion."""
    answer = client.completions.create(model="m", prompt="Hello", max_tokens=3, temperature=0)

    assert answer.choices[0].text == "Hel"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3


def test_completes_a_batch_with_choices(client: openai.OpenAI) -> None:
    """Several prompts times n, in their order."""
    answer = client.completions.create(
        model="m", prompt=["one", "two"], n=2, max_tokens=16, temperature=0
    )

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["one", "one", "two", "two"]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_streams_a_completion(client: openai.OpenAI) -> None:
    """Chunks add up to the answer, the last one has the usage."""
    chunks = list(
        client.completions.create(
            model="m",
            prompt="Grüße, 世界",
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert "".join(c.choices[0].text for c in chunks if c.choices) == "Grüße, 世界"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_chats(client: openai.OpenAI) -> None:
    """A message with role and content; the echo says the rendered template back."""
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "How are you?"}], temperature=0
    )

    assert answer.choices[0].message.role == "assistant"
    assert "How are you?" in (answer.choices[0].message.content or "")


def test_streams_a_chat(client: openai.OpenAI) -> None:
    """The first chunk has the role, the last one the finish reason."""
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "ping"}],
            temperature=0,
            stream=True,
        )
    )

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "ping" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    """Unknown model and bad values raise what the client has for them."""
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="x" * 40_000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_seeds_repeat(client: openai.OpenAI) -> None:
    """A seeded prompt gives the same tokens by itself and among others of the same request."""
    arguments: dict[str, Any] = {"model": "m", "max_tokens": 8, "temperature": 50, "seed": 11}
    alone = client.completions.create(prompt="abcdefgh", **arguments)
    among = client.completions.create(prompt=["12345678", "abcdefgh", "x"], **arguments)

    assert among.choices[1].text == alone.choices[0].text != "abcdefgh"


@pytest.mark.slow
def test_a_real_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same client on weights: greedy text is what transformers generates."""
    folder = tiny_model("llama", tmp_path_factory.mktemp("models"))
    [prompt] = clear_prompts(folder, 1, 12)
    expected = Tokenizer.load(folder).decode(greedy_tokens(folder, prompt, 12))
    flags = ("--dtype", "float32", "--served-model-name", "m")
    with (
        running_server(str(folder), *flags) as server,
        openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0) as client,
    ):
        ignore_eos = {"ignore_eos": True}
        arguments: dict[str, Any] = {"model": "m", "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(prompt=prompt, extra_body=ignore_eos, **arguments)
        chunks = client.completions.create(
            prompt=prompt, stream=True, extra_body=ignore_eos, **arguments
        )
        streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        chat = client.chat.completions.create(
            messages=[{"role": "user", "content": "Hello"}], **arguments
        )

    assert whole.choices[0].text == streamed == expected
    assert chat.usage is not None
    assert 0 < chat.usage.completion_tokens <= 12


def test_metrics_count_what_was_served(server: Server, client: openai.OpenAI) -> None:
    """Token counters and the histograms of each stage move with the requests."""
    before = {name: metric(server, name) for name in MOVING}
    client.completions.create(model="m", prompt="count", max_tokens=4, temperature=0)
    after = {name: metric(server, name) for name in MOVING}

    assert {name: after[name] - before[name] for name in MOVING} == MOVING
    assert metric(server, "raywire:num_requests_running") == 0
    assert metric(server, "raywire:num_requests_waiting") == 0


MOVING = {
    "raywire:generation_tokens_total": 4,
    "raywire:prompt_tokens_total": 5,
    "raywire:time_to_first_token_seconds_count": 1,
    "raywire:inter_token_latency_seconds_count": 3,
    "raywire:request_queue_time_seconds_count": 1,
    "raywire:request_prefill_time_seconds_count": 1,
    "raywire:request_decode_time_seconds_count": 1,
    "raywire:e2e_request_latency_seconds_count": 1,
}
