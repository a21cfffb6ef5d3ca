"""`instructor`: Pydantic classes out of a real model, in each of its modes that a server can do."""

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field
from steps import main, server, step

MESSAGES: list[Any] = [{"role": "user", "content": "Describe an animal as JSON."}]


class Animal(BaseModel):
    """An animal."""

    name: Literal["cat", "dog", "owl"]
    legs: int = Field(ge=0, le=9)
    can_fly: bool


def client(mode: Any) -> Any:
    plain = openai.OpenAI(base_url=server("demo"), api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def ask(mode: Any) -> dict[str, Any]:
    answer = client(mode).create(
        model="m",
        messages=MESSAGES,
        response_model=Animal,
        max_retries=0,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(answer, Animal)
    return answer.model_dump()


@step
def by_a_tool() -> Any:
    return ask(instructor.Mode.TOOLS)


@step
def by_a_schema() -> Any:
    return ask(instructor.Mode.JSON_SCHEMA)


@step
def in_parts() -> Any:
    parts = list(
        client(instructor.Mode.JSON_SCHEMA).create_partial(
            model="m", messages=MESSAGES, response_model=Animal, temperature=0, max_tokens=200
        )
    )
    return [len(parts) > 1, Animal.model_validate(parts[-1].model_dump()).model_dump()]


@step
async def asynchronously() -> Any:
    plain = openai.AsyncOpenAI(base_url=server("demo"), api_key="none", max_retries=0)
    it = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    answer = await it.create(
        model="m",
        messages=MESSAGES,
        response_model=Animal,
        max_retries=0,
        temperature=0,
        max_tokens=200,
    )
    return answer.model_dump()


if __name__ == "__main__":
    main()
