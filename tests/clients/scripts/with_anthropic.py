"""The `anthropic` client on /v1/messages: sync and async, its stream helper, tools, `.parse`."""

import asyncio
from typing import Any, Literal

import anthropic
from pydantic import BaseModel
from steps import main, server, step

MESSAGES: list[Any] = [{"role": "user", "content": "Grüße, 世界 🙂"}]
COLD = {"temperature": 0}
"""This client has no argument for it any more."""
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["city", "unit"],
        },
    }
]


class Animal(BaseModel):
    name: Literal["cat", "dog", "owl"]
    can_fly: bool


def client(name: str) -> Any:
    return anthropic.Anthropic(base_url=server(name, ""), api_key="none", max_retries=0)


def ask(name: str, **options: Any) -> Any:
    arguments = {"messages": MESSAGES, "max_tokens": 1024, "extra_body": COLD, **options}
    with client(name) as it:
        return it.messages.create(model="m", **arguments)


def calls(message: Any) -> list[Any]:
    return [[block.name, block.input] for block in message.content if block.type == "tool_use"]


@step
def answers() -> Any:
    message = ask("echo")
    cut = ask("echo", max_tokens=3, messages=[{"role": "user", "content": "abcdef"}])
    stopped = ask("echo", stop_sequences=["d"], messages=[{"role": "user", "content": "abcdef"}])
    return {
        "text": [block.text for block in message.content],
        "reasons": [each.stop_reason for each in (message, cut, stopped)],
        "stop_sequence": stopped.stop_sequence,
        "stopped": stopped.content[0].text,
        "output_tokens": cut.usage.output_tokens,
    }


@step
def hears_the_system() -> Any:
    alone, told = ask("echo"), ask("echo", system="Be brief.")
    with client("echo") as it:
        counted = it.messages.count_tokens(model="m", messages=MESSAGES, system="Be brief.")
    return {
        "more": told.usage.input_tokens > alone.usage.input_tokens,
        "counted": counted.input_tokens == told.usage.input_tokens,
    }


@step
def streams() -> Any:
    with client("echo") as it:
        with it.messages.stream(
            model="m", messages=MESSAGES, extra_body=COLD, max_tokens=1024
        ) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        raw = it.messages.create(
            model="m", messages=MESSAGES, extra_body=COLD, max_tokens=1024, stream=True
        )
        kinds = [event.type for event in raw]
    return {"text": text, "final": message.content[0].text, "kinds": [kinds[0], kinds[-1]]}


@step
async def many_at_once() -> Any:
    async with anthropic.AsyncAnthropic(
        base_url=server("echo", ""), api_key="none", max_retries=0
    ) as it:
        return await asyncio.gather(*(_ask(it, f"number {i}") for i in range(16)))


async def _ask(it: Any, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    async with it.messages.stream(
        model="m", messages=messages, extra_body=COLD, max_tokens=64
    ) as stream:
        return "".join([piece async for piece in stream.text_stream])


@step
def calls_tools() -> Any:
    first = ask("tools", tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "3 degrees"}
        for block in first.content
        if block.type == "tool_use"
    ]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = ask("tools", tools=TOOLS, messages=turns)
    return {
        "text": [block.text.strip() for block in first.content if block.type == "text"],
        "calls": calls(first),
        "reasons": [first.stop_reason, second.stop_reason],
    }


@step
def streams_tools() -> Any:
    with client("tools") as it:
        with it.messages.stream(
            model="m", messages=MESSAGES, extra_body=COLD, max_tokens=1024, tools=TOOLS
        ) as stream:
            return calls(stream.get_final_message())


@step
def makes_the_model_call() -> Any:
    schema = {**Animal.model_json_schema(), "additionalProperties": False}
    tools = [{"name": "describe", "description": "An animal", "input_schema": schema}]
    found = []
    for choice in ({"type": "any"}, {"type": "tool", "name": "describe"}):
        answer = ask("demo", tools=tools, tool_choice={**choice, "disable_parallel_tool_use": True})
        for name, arguments in calls(answer):
            found.append([name, Animal.model_validate(arguments).model_dump()])
    return found


@step
def parses() -> Any:
    with client("demo") as it:
        answer = it.messages.parse(
            model="m", messages=MESSAGES, extra_body=COLD, max_tokens=1024, output_format=Animal
        )
    assert isinstance(answer.parsed_output, Animal)
    return answer.parsed_output.model_dump()


def type_of(error: anthropic.APIStatusError) -> Any:
    body: Any = error.body
    return body["error"]["type"]


@step
def errors() -> Any:
    found: dict[str, Any] = {}
    with client("echo") as it:
        try:
            it.messages.create(model="nobody", messages=MESSAGES, max_tokens=8)
        except anthropic.NotFoundError as error:
            found["model"] = type_of(error)
        try:
            it.messages.create(
                model="m", messages=MESSAGES, max_tokens=8, extra_body={"temperature": -1}
            )
        except anthropic.BadRequestError as error:
            found["value"] = type_of(error)
    return found


if __name__ == "__main__":
    main()
