"""The `openai` client: sync and async, stream helpers, `.parse` with Pydantic, and responses."""

import asyncio
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field
from steps import main, server, step

MESSAGES: list[Any] = [{"role": "user", "content": "Grüße, 世界 🙂"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["celsius", "kelvin"]


class Animal(BaseModel):
    """What the real model is made to fill in."""

    name: Literal["cat", "dog", "owl"]
    legs: int = Field(ge=0, le=9)
    can_fly: bool


def tool() -> Any:
    """A new one each time: `.parse` leaves its mark on those that it gets."""
    return openai.pydantic_function_tool(GetWeather, name="get_weather")


def client(name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server(name), api_key="none", max_retries=0, timeout=120)


def async_client(name: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server(name), api_key="none", max_retries=0, timeout=120)


@step
def lists_models() -> Any:
    with client("echo") as it:
        return {"all": [model.id for model in it.models.list()], "one": it.models.retrieve("m").id}


@step
def completes() -> Any:
    with client("echo") as it:
        whole = it.completions.create(model="m", prompt=["one", "two"], n=2, temperature=0)
        chunks = list(
            it.completions.create(
                model="m",
                prompt="Grüße, 世界",
                temperature=0,
                max_tokens=64,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    usage = chunks[-1].usage
    assert usage is not None
    return {
        "texts": [choice.text for choice in whole.choices],
        "streamed": "".join(chunk.choices[0].text for chunk in chunks if chunk.choices),
        "usage": usage.to_dict(),
    }


@step
def chats() -> Any:
    with client("echo") as it:
        raw = it.chat.completions.with_raw_response.create(
            model="m", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
        )
        answer = raw.parse()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    return {
        "text": answer.choices[0].message.content,
        "role": answer.choices[0].message.role,
        "finish_reason": answer.choices[0].finish_reason,
        "bytes": bytes(byte for token in content for byte in token.bytes or []).decode(),
        "tops": sorted({len(token.top_logprobs) for token in content}),
        "request_id": raw.headers.get("x-request-id"),
    }


@step
def streams_with_the_helper() -> Any:
    with (
        client("echo") as it,
        it.chat.completions.stream(model="m", messages=MESSAGES, temperature=0) as stream,
    ):
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    return {
        "deltas": "".join(deltas),
        "final": final.choices[0].message.content,
        "done": [event.content for event in events if event.type == "content.done"],
    }


@step
def stops_reading() -> Any:
    """A stream that is closed early, and the next request on the same client."""
    with client("endless") as it:
        stream = it.completions.create(model="m", prompt="x", max_tokens=20_000, stream=True)
        first = next(iter(stream))
        stream.close()
        text = it.completions.create(model="m", prompt="x", max_tokens=3, temperature=0)
    return [bool(first.choices[0].text), text.choices[0].text]


@step
async def many_at_once() -> Any:
    async with async_client("echo") as it:
        return await asyncio.gather(*(_ask(it, f"number {i}") for i in range(32)))


async def _ask(it: openai.AsyncOpenAI, text: str) -> str:
    messages: list[Any] = [{"role": "user", "content": text}]
    stream = await it.chat.completions.create(
        model="m", messages=messages, temperature=0, stream=True
    )
    return "".join(
        [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    )


@step
async def streams_with_the_async_helper() -> Any:
    async with async_client("echo") as it:
        async with it.chat.completions.stream(
            model="m", messages=MESSAGES, temperature=0
        ) as stream:
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
    return "".join(deltas)


@step
def errors() -> Any:
    found: dict[str, Any] = {}
    with client("echo") as it:
        try:
            it.chat.completions.create(model="nobody", messages=MESSAGES)
        except openai.NotFoundError as error:
            found["model"] = error.code
        try:
            it.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
        except openai.BadRequestError as error:
            found["value"] = [error.type, error.param]
        try:
            it.completions.create(model="m", prompt="x" * 40_000, stream=True)
        except openai.BadRequestError as error:
            found["length"] = error.code
    return found


@step
def calls_tools() -> Any:
    with client("tools") as it:
        first = it.chat.completions.parse(
            model="m", messages=MESSAGES, temperature=0, tools=[tool()]
        )
        message = first.choices[0].message
        calls = message.tool_calls or []
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"} for call in calls
        ]
        conversation: list[Any] = [*MESSAGES, message, *results]
        second = it.chat.completions.create(
            model="m", messages=conversation, temperature=0, tools=[tool()]
        )
    for call in calls:
        assert isinstance(call.function.parsed_arguments, GetWeather)
    return {
        "content": message.content,
        "reasoning": getattr(message, "reasoning_content", None),
        "calls": [[call.function.name, call.function.arguments] for call in calls],
        "finish_reason": first.choices[0].finish_reason,
        "second": second.choices[0].finish_reason,
    }


@step
def streams_tools() -> Any:
    with client("tools") as it:
        with it.chat.completions.stream(
            model="m", messages=MESSAGES, temperature=0, tools=[tool()]
        ) as stream:
            events = list(stream)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    for event in done:
        assert isinstance(event.parsed_arguments, GetWeather)
    return [[event.name, event.arguments] for event in done]


@step
def parses() -> Any:
    messages: list[Any] = [{"role": "user", "content": "Describe an animal as JSON."}]
    with client("demo") as it:
        whole = it.chat.completions.parse(
            model="m", messages=messages, temperature=0, response_format=Animal
        )
        helper = it.chat.completions.stream(
            model="m", messages=messages, temperature=0, response_format=Animal
        )
        with helper as stream:
            [done] = [event for event in stream if event.type == "content.done"]
    assert isinstance(whole.choices[0].message.parsed, Animal)
    assert isinstance(done.parsed, Animal)
    return whole.choices[0].message.parsed.model_dump()


@step
def makes_the_model_call() -> Any:
    """A required and a named tool, which a grammar enforces."""
    named: Any = {"type": "function", "function": {"name": "describe"}}
    describe: Any = openai.pydantic_function_tool(Animal, name="describe")
    messages: list[Any] = [{"role": "user", "content": "Describe an animal."}]
    found = []
    with client("demo") as it:
        for choice in ("required", named):
            answer = it.chat.completions.parse(
                model="m",
                messages=messages,
                tools=[describe],
                tool_choice=choice,
                parallel_tool_calls=False,
                temperature=0,
            )
            calls = answer.choices[0].message.tool_calls or []
            assert all(isinstance(call.function.parsed_arguments, Animal) for call in calls)
            found.append([call.function.name for call in calls])
    return found


@step
def responds() -> Any:
    with client("echo") as it:
        whole = it.responses.create(model="m", input="Grüße", temperature=0)
        next_one = it.responses.create(
            model="m", input="more", temperature=0, previous_response_id=whole.id
        )
        again = it.responses.retrieve(whole.id)
        it.responses.delete(whole.id)
    assert whole.usage is not None
    assert next_one.usage is not None
    return {
        "text": whole.output_text,
        "status": whole.status,
        "same": again.output_text == whole.output_text,
        "grew": next_one.usage.input_tokens > whole.usage.input_tokens,
        "tokens": whole.usage.total_tokens - whole.usage.input_tokens - whole.usage.output_tokens,
    }


@step
def streams_responses() -> Any:
    with (
        client("echo") as it,
        it.responses.stream(model="m", input="Grüße", temperature=0) as stream,
    ):
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    return {
        "deltas": "".join(deltas),
        "final": final.output_text,
        "kinds": [events[0].type, events[-1].type],
        "numbers": [event.sequence_number for event in events] == list(range(len(events))),
    }


@step
def parses_responses() -> Any:
    with client("demo") as it:
        answer = it.responses.parse(
            model="m", input="Describe an animal.", temperature=0, text_format=Animal
        )
    assert isinstance(answer.output_parsed, Animal)
    return answer.output_parsed.model_dump()


@step
def calls_tools_in_responses() -> Any:
    parameters = tool()["function"]["parameters"]
    flat = {"type": "function", "name": "get_weather", "strict": True, "parameters": parameters}
    tools: list[Any] = [flat]
    with client("tools") as it:
        answer = it.responses.create(
            model="m", input="The weather, please.", temperature=0, tools=tools
        )
    return [[item.name, item.arguments] for item in answer.output if item.type == "function_call"]


if __name__ == "__main__":
    main()
