"""OpenAI's Agents SDK, in an environment of its own."""

import pytest

from tests.clients.results import Results
from tests.clients.servers import TOOL_CALLS

CLIENT = "agents"
SERVERS = ("echo", "tools")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CALLED = sorted([call["city"], call["unit"]] for _, call in TOOL_CALLS)


def test_converses(results: Results) -> None:
    """With what the server keeps, and with what it keeps itself, to the same effect."""
    assert results["converses"] == ["Grüße, 世界 🙂", True, True]


def test_calls_tools(results: Results) -> None:
    """Thoughts, a text and two calls, whose results it has."""
    it = results["calls_tools"]

    assert it["called"] == CALLED
    assert it["kinds"][:4] == [
        "ReasoningItem",
        "MessageOutputItem",
        "ToolCallItem",
        "ToolCallItem",
    ]
    assert it["output"] == "sunny in München"


def test_streams(results: Results) -> None:
    """The same, from events."""
    it = results["streams"]

    assert it["called"] == CALLED
    assert "raw_response_event" in it["kinds"]
    assert it["output"] == "sunny in München"
