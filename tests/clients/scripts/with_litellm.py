"""LiteLLM, with the server as an OpenAI and as a vLLM one."""

import asyncio
from typing import Any, Literal

import litellm
from pydantic import BaseModel
from steps import main, server, step

MESSAGES: list[Any] = [{"role": "user", "content": "Grüße, 世界 🙂"}]
PROVIDERS = ("openai", "hosted_vllm")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


class Animal(BaseModel):
    name: Literal["cat", "dog", "owl"]
    can_fly: bool


def where(name: str) -> dict[str, Any]:
    return {"api_base": server(name), "api_key": "none", "max_retries": 0}


def ask(name: str, provider: str = "openai", **options: Any) -> Any:
    arguments = {"messages": MESSAGES, "temperature": 0, **where(name), **options}
    return litellm.completion(model=f"{provider}/m", **arguments)


def calls(message: Any) -> list[Any]:
    return [[call.function.name, call.function.arguments] for call in message.tool_calls or []]


@step
def answers() -> Any:
    found = [ask("echo", provider) for provider in PROVIDERS]
    return [
        [
            answer.choices[0].message.content,
            answer.choices[0].finish_reason,
            answer.usage.total_tokens
            == answer.usage.prompt_tokens + answer.usage.completion_tokens,
        ]
        for answer in found
    ]


@step
def streams() -> Any:
    found = []
    for provider in PROVIDERS:
        chunks = list(ask("echo", provider, stream=True, stream_options={"include_usage": True}))
        whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        found.append([whole.choices[0].message.content, whole.usage.completion_tokens > 0])
    return found


@step
def completes() -> Any:
    answer = litellm.text_completion(
        model="text-completion-openai/m",
        prompt="Hello",
        max_tokens=3,
        temperature=0,
        **where("echo"),
    )
    return answer.choices[0].text


@step
async def many_at_once() -> Any:
    return await asyncio.gather(*(_ask(f"number {i}") for i in range(16)))


async def _ask(text: str) -> str:
    answer = await litellm.acompletion(
        model="openai/m",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        stream=True,
        **where("echo"),
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


@step
def calls_tools() -> Any:
    message = ask("tools", "hosted_vllm", tools=TOOLS).choices[0].message
    chunks = list(ask("tools", "hosted_vllm", tools=TOOLS, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls
    ]
    turns = [*MESSAGES, message, *results]
    second = ask("tools", "hosted_vllm", tools=TOOLS, messages=turns)
    return {
        "content": message.content,
        "reasoning": message.reasoning_content,
        "calls": calls(message),
        "streamed": calls(streamed),
        "second": second.choices[0].finish_reason,
    }


@step
def fills_a_schema() -> Any:
    answer = ask("demo", "hosted_vllm", response_format=Animal, max_tokens=100)
    return Animal.model_validate_json(answer.choices[0].message.content).model_dump()


@step
def errors() -> Any:
    found = []
    for options in ({"temperature": -1}, {"messages": [{"role": "user", "content": "x" * 40_000}]}):
        try:
            ask("echo", **options)
        except litellm.ContextWindowExceededError:
            found.append("too long")
        except litellm.BadRequestError:
            found.append("bad request")
    return found


if __name__ == "__main__":
    main()
