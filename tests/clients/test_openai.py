"""The `openai` client, in an environment of its own."""

import pytest

from tests.clients.results import Results, decoded
from tests.clients.servers import TOOL_CALLS

CLIENT = "openai"
SERVERS = ("echo", "endless", "tools", "demo")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_lists_models(results: Results) -> None:
    """All, and one by its name."""
    assert results["lists_models"] == {"all": ["m"], "one": "m"}


def test_completes(results: Results) -> None:
    """A batch with choices, and a stream with usage in its last chunk."""
    it = results["completes"]

    assert it["texts"] == ["one", "one", "two", "two"]
    assert it["streamed"] == "Grüße, 世界"
    usage = it["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_chats(results: Results) -> None:
    """The client's own types hold all that it has fields for."""
    it = results["chats"]

    assert it["text"] == "Grüße, 世界 🙂"
    assert it["text"] in it["bytes"]  # special tokens are among the log probabilities
    assert (it["role"], it["finish_reason"], it["tops"]) == ("assistant", "stop", [2])
    assert it["request_id"]


def test_streaming_helpers(results: Results) -> None:
    """Their events add up to the answer, sync and async."""
    it = results["streams_with_the_helper"]

    assert it["deltas"] == it["final"] == "Grüße, 世界 🙂"
    assert it["done"] == ["Grüße, 世界 🙂"]
    assert results["streams_with_the_async_helper"] == "Grüße, 世界 🙂"


def test_a_stream_may_be_left(results: Results) -> None:
    """And the client goes on with the next request."""
    assert results["stops_reading"] == [True, "abc"]


def test_many_streams_at_once(results: Results) -> None:
    """Nobody gets what is somebody else's."""
    assert results["many_at_once"] == [f"number {i}" for i in range(32)]


def test_errors_are_the_clients_own(results: Results) -> None:
    """Each a class of the client, with code and field."""
    assert results["errors"] == {
        "model": "model_not_found",
        "value": ["invalid_request_error", "temperature"],
        "length": "context_length_exceeded",
    }


def test_calls_tools(results: Results) -> None:
    """Thoughts, content and calls, whose arguments become the user's Pydantic model."""
    it = results["calls_tools"]

    assert it["content"] == "I will look that up."
    assert it["reasoning"] == "They ask for two cities: é, 漢字."
    assert decoded(it["calls"]) == TOOL_CALLS
    assert it["finish_reason"] == it["second"] == "tool_calls"


def test_streams_tool_calls(results: Results) -> None:
    """The helper's events have the same calls, parsed."""
    assert decoded(results["streams_tools"]) == TOOL_CALLS


def test_parses_into_a_model(results: Results) -> None:
    """`.parse` with a Pydantic class: a real model says what the class can hold."""
    assert results["parses"]["name"] in ("cat", "dog", "owl")


def test_makes_the_model_call_a_tool(results: Results) -> None:
    """`tool_choice` required and by name."""
    assert results["makes_the_model_call"] == [["describe"], ["describe"]]


def test_responds(results: Results) -> None:
    """A response, the next one after it, and both by their ids."""
    it = results["responds"]

    assert (it["text"], it["status"]) == ("Grüße", "completed")
    assert it["same"]
    assert it["grew"]
    assert it["tokens"] == 0


def test_streams_a_response(results: Results) -> None:
    """Typed events in their order, numbered without a gap."""
    it = results["streams_responses"]

    assert it["deltas"] == it["final"] == "Grüße"
    assert it["kinds"] == ["response.created", "response.completed"]
    assert it["numbers"]


def test_parses_a_response(results: Results) -> None:
    """`.responses.parse` with a Pydantic class."""
    assert 0 <= results["parses_responses"]["legs"] <= 9


def test_calls_tools_in_responses(results: Results) -> None:
    """Items of the kind `function_call`."""
    assert decoded(results["calls_tools_in_responses"]) == TOOL_CALLS
