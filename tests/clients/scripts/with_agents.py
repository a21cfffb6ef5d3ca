"""OpenAI's Agents SDK, which speaks /v1/responses."""

from typing import Any

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from steps import main, server, step

set_tracing_disabled(True)  # else it tells OpenAI

called: list[Any] = []


def use(name: str) -> None:
    client = AsyncOpenAI(base_url=server(name), api_key="none", max_retries=0)
    set_default_openai_client(client, use_for_tracing=False)


@function_tool  # type: ignore[untyped-decorator]
def get_weather(city: str, unit: str) -> str:
    """The weather of a city."""
    called.append([city, unit])
    return f"sunny in {city}"


def looker() -> Any:
    """An agent that ends with the results of its first tools."""
    return Agent(
        name="looker",
        instructions="Look it up.",
        model="m",
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
    )


@step
async def converses() -> Any:
    use("echo")
    agent = Agent(name="echo", model="m")
    first = await Runner.run(agent, "Grüße, 世界 🙂")
    kept = await Runner.run(agent, "and then?", previous_response_id=first.last_response_id)
    own = await Runner.run(
        agent, [*first.to_input_list(), {"role": "user", "content": "and then?"}]
    )
    usage = first.context_wrapper.usage
    return [first.final_output, kept.final_output == own.final_output, usage.total_tokens > 0]


@step
async def calls_tools() -> Any:
    use("tools")
    called.clear()
    result = await Runner.run(looker(), "Compare the weather, please.")
    kinds = [type(item).__name__ for item in result.new_items]
    return {"called": sorted(called), "kinds": kinds, "output": result.final_output}


@step
async def streams() -> Any:
    use("tools")
    called.clear()
    result = Runner.run_streamed(looker(), "Compare the weather, please.")
    kinds = [event.type async for event in result.stream_events()]
    return {"called": sorted(called), "kinds": sorted(set(kinds)), "output": result.final_output}


if __name__ == "__main__":
    main()
