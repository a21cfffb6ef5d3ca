"""LiteLLM, in an environment of its own."""

import pytest

from tests.clients.results import Results, decoded
from tests.clients.servers import TOOL_CALLS

CLIENT = "litellm"
SERVERS = ("echo", "tools", "demo")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_answers(results: Results) -> None:
    """As its provider `openai`, and as `hosted_vllm`."""
    assert results["answers"] == [["Grüße, 世界 🙂", "stop", True]] * 2


def test_streams(results: Results) -> None:
    """Its own joining of chunks gives the answer and the usage."""
    assert results["streams"] == [["Grüße, 世界 🙂", True]] * 2


def test_completes(results: Results) -> None:
    """`text_completion`, on the older route."""
    assert results["completes"] == "Hel"


def test_many_streams_at_once(results: Results) -> None:
    """Nobody gets what is somebody else's."""
    assert results["many_at_once"] == [f"number {i}" for i in range(16)]


def test_calls_tools(results: Results) -> None:
    """Thoughts, content and calls, whole and streamed, and the turn after them."""
    it = results["calls_tools"]

    assert it["content"] == "I will look that up."
    assert it["reasoning"] == "They ask for two cities: é, 漢字."
    assert decoded(it["calls"]) == decoded(it["streamed"]) == TOOL_CALLS
    assert it["second"] == "tool_calls"


def test_fills_a_schema(results: Results) -> None:
    """`response_format` as a Pydantic class."""
    assert results["fills_a_schema"]["name"] in ("cat", "dog", "owl")


def test_errors_are_the_clients_own(results: Results) -> None:
    """It tells a bad value from a prompt that is too long."""
    assert results["errors"] == ["bad request", "too long"]
