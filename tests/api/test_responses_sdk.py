"""/v1/responses through the `openai` client, unmodified: what it reads are its own types."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types import responses as sdk
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from api.responses.protocol import KNOWN, UNSUPPORTED, Response
from tests.helpers.fake_engine import endless_answer, prompt_as_answer, text_as_answer
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.responses import ANSWER, TEMPLATE, WEATHER, LateFailure


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    with serving(chat_template=TEMPLATE, reasoning_parser="auto") as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    shared.engine.answer = text_as_answer(ANSWER)
    return shared


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


TOOL: Any = {**WEATHER, "strict": True}


def check(model: pydantic.BaseModel) -> None:
    """The client takes whatever it gets; its types say what it expects."""
    type(model).model_validate(model.to_dict() if hasattr(model, "to_dict") else {})


def test_each_of_its_parameters_is_known() -> None:
    """Served, accepted, or refused with a reason: a new version of the client that has more of
    them fails here."""
    parameters = ResponseCreateParamsBase.__annotations__.keys() | {"stream"}

    assert parameters - KNOWN - UNSUPPORTED.keys() == set()


def test_each_field_of_a_response_is_its_own() -> None:
    """But for `store`, which OpenAI's server says too; and what is not there is what only
    OpenAI's models and servers have."""
    ours, its = set(Response.__struct_fields__), set(sdk.Response.model_fields)

    assert ours - its <= {"store"}
    assert its - ours <= {
        "access_programs",
        "conversation",
        "image",
        "input_transformations",
        "moderation",
        "prompt",
        "prompt_cache_diagnostics",
        "prompt_cache_options",
        "prompt_cache_retention",
        "tool_usage",
    }


def test_creates(client: openai.OpenAI) -> None:
    """Whole, with all kinds of items."""
    response = client.responses.create(
        model="m",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        tools=[TOOL],
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        reasoning={"effort": "low"},
        metadata={"a": "b"},
    )

    check(response)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Let me see."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("Hm.")


def test_streams(client: openai.OpenAI) -> None:
    """Each event is one of its types."""
    found = list(client.responses.create(model="m", input="hi", tools=[TOOL], stream=True))

    for event in found:
        check(event)
    assert {type(event).__name__ for event in found} == {
        "ResponseCreatedEvent",
        "ResponseInProgressEvent",
        "ResponseOutputItemAddedEvent",
        "ResponseContentPartAddedEvent",
        "ResponseReasoningTextDeltaEvent",
        "ResponseReasoningTextDoneEvent",
        "ResponseTextDeltaEvent",
        "ResponseTextDoneEvent",
        "ResponseFunctionCallArgumentsDeltaEvent",
        "ResponseFunctionCallArgumentsDoneEvent",
        "ResponseContentPartDoneEvent",
        "ResponseOutputItemDoneEvent",
        "ResponseCompletedEvent",
    }


def test_its_helper_follows_a_stream(client: openai.OpenAI) -> None:
    """It puts the response together by itself, and complains where events do not fit."""
    with client.responses.stream(model="m", input="hi", tools=[TOOL]) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        response = stream.get_final_response()

    assert snapshots[-1] == response.output_text == "Let me see."
    call = response.output[2]
    assert isinstance(call, sdk.ParsedResponseFunctionToolCall)
    assert call.parsed_arguments == {"city": "Köln 🙂"}


def test_its_async_client_works_too(server: HttpServer) -> None:
    """Whole, streamed, and with the helper."""

    async def run() -> list[str]:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = await client.responses.create(model="m", input="hi")
            stream = await client.responses.create(model="m", input="hi", stream=True)
            texts = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            async with client.responses.stream(model="m", input="hi") as helper:
                final = await helper.get_final_response()
            return [whole.output_text, "".join(texts), final.output_text]

    assert len(set(asyncio.run(run()))) == 1


def test_conversation_goes_on(client: openai.OpenAI, server: HttpServer) -> None:
    """An agent's turn: a call, its result, and what the server keeps of both."""
    first = client.responses.create(model="m", input="hi", tools=[TOOL])
    call = first.output[2]
    assert isinstance(call, sdk.ResponseFunctionToolCall)
    server.engine.answer = prompt_as_answer

    second = client.responses.create(
        model="m",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        previous_response_id=first.id,
    )

    assert second.output_text.endswith("<tool>rain<assistant>")
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    for item in items:
        check(item)
    assert [item.type for item in items] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert client.responses.retrieve(second.id) == second
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_runs_in_the_background(client: openai.OpenAI, server: HttpServer) -> None:
    """Created, lost, found again, cancelled."""
    server.engine.answer = endless_answer
    server.engine.step_s = 0.001
    stream = client.responses.create(model="m", input="hi", background=True, stream=True)
    first = next(iter(stream))
    assert isinstance(first, sdk.ResponseCreatedEvent)
    name = first.response.id
    stream.close()

    running = client.responses.retrieve(name)
    again = iter(client.responses.retrieve(name, stream=True, starting_after=0))
    second = next(again)
    cancelled = client.responses.cancel(name)
    last = list(again)[-1]

    check(running)
    check(cancelled)
    assert (running.status, cancelled.status) == ("in_progress", "cancelled")
    assert second.type == "response.in_progress"
    assert last.type == "response.incomplete"
    assert last.response == cancelled
    server.engine.step_s = 0.0
    server.wait_idle()


def test_incomplete_responses_say_so(client: openai.OpenAI, server: HttpServer) -> None:
    """Whole and streamed."""
    server.engine.answer = endless_answer

    whole = client.responses.create(model="m", input="hi", max_output_tokens=3)
    *_, last = client.responses.create(model="m", input="hi", max_output_tokens=3, stream=True)

    check(whole)
    check(last)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"


def test_failures_are_events(client: openai.OpenAI, server: HttpServer) -> None:
    """After the first byte."""
    server.engine.answer = failure = LateFailure("H")
    found = []

    for event in client.responses.create(model="m", input="hi", stream=True):
        found.append(event)
        if event.type == "response.output_text.delta":
            failure.fail("")

    check(found[-1])
    assert found[-1].type == "response.failed"
    assert found[-1].response.error is not None
    assert found[-1].response.error.code == "server_error"


def test_mistakes_are_its_errors(client: openai.OpenAI) -> None:
    """With the field's name."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="m", input="hi", tools=[{"type": "web_search"}])
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="m", input="hi", previous_response_id="resp_none")

    assert bad.value.param == "tools[0].type"
    assert missing.value.code == "previous_response_not_found"
