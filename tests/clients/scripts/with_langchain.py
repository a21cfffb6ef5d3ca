"""LangChain's ChatOpenAI: invoke, stream, bind_tools, with_structured_output."""

import asyncio
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from steps import main, server, step


class get_weather(BaseModel):  # the tool's name
    """The weather of a city."""

    city: str
    unit: Literal["celsius", "kelvin"]


class Animal(BaseModel):
    """An animal."""

    name: Literal["cat", "dog", "owl"]
    legs: int = Field(ge=0, le=9)


def chat(name: str, **options: Any) -> Any:
    settings = {"temperature": 0, "max_retries": 0, "timeout": 120, **options}
    return ChatOpenAI(model="m", base_url=server(name), api_key="none", **settings)


def calls(message: Any) -> list[Any]:
    return [[call["name"], call["args"]] for call in message.tool_calls]


@step
def invokes() -> Any:
    answer = chat("echo").invoke([SystemMessage("Be brief."), HumanMessage("Grüße, 世界")])
    legacy = OpenAI(model="m", base_url=server("echo"), api_key="none", temperature=0)
    return {
        "text": answer.content,
        "finish_reason": answer.response_metadata["finish_reason"],
        "tokens": answer.usage_metadata["output_tokens"] > 0,
        "completed": legacy.invoke("Hello"),
    }


@step
def streams() -> Any:
    chunks = list(chat("echo", stream_usage=True).stream("Grüße, 世界 🙂"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return [whole.content, len(chunks) > 2, whole.usage_metadata["output_tokens"] > 0]


@step
async def many_at_once() -> Any:
    model = chat("echo")
    batch = await model.abatch([f"number {i}" for i in range(8)])
    streamed = await asyncio.gather(*(_stream(model, f"number {i}") for i in range(8)))
    return [[message.content for message in batch], streamed]


async def _stream(model: Any, text: str) -> str:
    return "".join([chunk.content async for chunk in model.astream(text)])


@step
def calls_tools() -> Any:
    model = chat("tools").bind_tools([get_weather])
    question = HumanMessage("Compare the weather.")
    first = model.invoke([question])
    results = [ToolMessage("3 degrees", tool_call_id=call["id"]) for call in first.tool_calls]
    second = model.invoke([question, first, *results])
    streamed = None
    for chunk in model.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    return {
        "content": first.content,
        "calls": calls(first),
        "streamed": calls(streamed),
        "second": len(second.tool_calls),
        "invalid": len(first.invalid_tool_calls),
    }


@step
def makes_the_model_call() -> Any:
    found = []
    for choice in ("any", "Animal"):
        model = chat("demo", max_tokens=200).bind_tools(
            [Animal], tool_choice=choice, parallel_tool_calls=False
        )
        found.append(calls(model.invoke("Describe an animal.")))
    return [[Animal.model_validate(args) and name for name, args in each] for each in found]


@step
def structures_output() -> Any:
    found = {}
    for method in ("json_schema", "function_calling"):
        model = chat("demo", max_tokens=200).with_structured_output(Animal, method=method)
        answer = model.invoke("Describe an animal.")
        assert isinstance(answer, Animal)
        found[method] = answer.model_dump()
    return found


@step
def streams_structured_output() -> Any:
    model = chat("demo", max_tokens=200).with_structured_output(Animal)
    *_, last = model.stream("Describe an animal.")
    assert isinstance(last, Animal)
    return last.model_dump()


@step
def speaks_responses() -> Any:
    model = chat("echo", use_responses_api=True)
    return [model.invoke("Grüße").text, "".join(chunk.text for chunk in model.stream("Grüße"))]


if __name__ == "__main__":
    main()
