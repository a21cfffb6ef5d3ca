"""The `anthropic` client's own loop over tools, unmodified: it asks, runs, asks again, and ends."""

from collections.abc import Iterator

import anthropic

from engine.wire import EngineCoreRequest
from tests.helpers.anthropic_stream import TEMPLATE
from tests.helpers.byte_folder import END
from tests.helpers.http_server import HttpServer, serving

CALLS = """\
<think>Two cities.</think>Let me see.
<tool_call>{"name": "get_weather", "arguments": {"city": "München"}}</tool_call>
<tool_call>{"name": "get_weather", "arguments": {"city": "東京"}}</tool_call>"""


def answer(request: EngineCoreRequest) -> Iterator[int]:
    """Calls a tool until it has answered, and then says what it has answered."""
    assert request.prompt_token_ids is not None
    prompt = bytes(request.prompt_token_ids.tolist()).decode()
    results = [each.partition("<")[0] for each in prompt.split("<tool>")[1:]]
    yield from (" and ".join(results) if results else CALLS).encode()
    yield END


def run(
    server: HttpServer, is_streamed: bool
) -> tuple[list[str], anthropic.types.beta.BetaMessage]:
    """The cities that the tool was asked for, and the last message."""
    cities: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"rain in {city}"

    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="m",
            max_tokens=400,
            messages=[{"role": "user", "content": "Compare the weather, please."}],
            tools=[get_weather],
            stream=is_streamed,
            max_iterations=5,
        )
        return cities, runner.until_done()


def test_the_loop_ends_with_the_answer() -> None:
    """Thoughts, calls and results go back and forth, streamed or not."""
    with serving(answer, chat_template=TEMPLATE, reasoning_parser="auto") as server:
        for is_streamed in (False, True):
            cities, message = run(server, is_streamed)

            assert cities == ["München", "東京"]
            assert message.stop_reason == "end_turn"
            [block] = message.content
            assert block.type == "text"
            assert block.text == "rain in München and rain in 東京"
