"""The `anthropic` client on /v1/messages, in an environment of its own."""

import pytest

from tests.clients.results import Results
from tests.clients.servers import TOOL_CALLS

CLIENT = "anthropic"
SERVERS = ("echo", "tools", "demo")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_answers(results: Results) -> None:
    """Text, usage, and why it ends: by itself, at the limit, at a stop sequence."""
    it = results["answers"]

    assert it["text"] == ["Grüße, 世界 🙂"]
    assert it["reasons"] == ["end_turn", "max_tokens", "stop_sequence"]
    assert (it["stopped"], it["stop_sequence"], it["output_tokens"]) == ("abc", "d", 3)


def test_hears_the_system(results: Results) -> None:
    """It is in the prompt, and `count_tokens` counts what a request then has."""
    assert results["hears_the_system"] == {"more": True, "counted": True}


def test_streams(results: Results) -> None:
    """The helper's text and final message, and the raw events around them."""
    it = results["streams"]

    assert it["text"] == it["final"] == "Grüße, 世界 🙂"
    assert it["kinds"] == ["message_start", "message_stop"]


def test_many_streams_at_once(results: Results) -> None:
    """Nobody gets what is somebody else's."""
    assert results["many_at_once"] == [f"number {i}" for i in range(16)]


def test_calls_tools(results: Results) -> None:
    """Blocks of text and of calls; the conversation goes on with results."""
    it = results["calls_tools"]

    assert it["text"] == ["I will look that up."]
    assert it["calls"] == [list(call) for call in TOOL_CALLS]
    assert it["reasons"] == ["tool_use", "tool_use"]


def test_streams_tool_calls(results: Results) -> None:
    """The helper puts the same calls together."""
    assert results["streams_tools"] == [list(call) for call in TOOL_CALLS]


def test_makes_the_model_call_a_tool(results: Results) -> None:
    """`tool_choice` any and by name, on a real model: the arguments fit the schema."""
    assert [name for name, _ in results["makes_the_model_call"]] == ["describe", "describe"]


def test_parses_into_a_model(results: Results) -> None:
    """`.parse` with a Pydantic class."""
    assert results["parses"]["name"] in ("cat", "dog", "owl")


def test_errors_are_the_clients_own(results: Results) -> None:
    """Each a class of the client, with Anthropic's types."""
    assert results["errors"] == {"model": "not_found_error", "value": "invalid_request_error"}
