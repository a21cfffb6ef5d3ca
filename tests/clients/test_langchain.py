"""LangChain's ChatOpenAI, in an environment of its own."""

import pytest

from tests.clients.results import Results
from tests.clients.servers import TOOL_CALLS

CLIENT = "langchain"
SERVERS = ("echo", "tools")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_invokes(results: Results) -> None:
    """Text, usage and finish reason; the older route as well."""
    assert results["invokes"] == {
        "text": "Be brief.Grüße, 世界",
        "finish_reason": "stop",
        "tokens": True,
        "completed": "Hello",
    }


def test_streams(results: Results) -> None:
    """Chunks add up, by LangChain's own addition, to text and usage."""
    assert results["streams"] == ["Grüße, 世界 🙂", True, True]


def test_many_at_once(results: Results) -> None:
    """A batch, and streams side by side."""
    assert results["many_at_once"] == [[f"number {i}" for i in range(8)]] * 2


def test_calls_tools(results: Results) -> None:
    """`bind_tools`: whole and streamed, and the turn after the results."""
    it = results["calls_tools"]

    assert it["content"] == "I will look that up."
    assert it["calls"] == it["streamed"] == [list(call) for call in TOOL_CALLS]
    assert (it["second"], it["invalid"]) == (2, 0)


def test_speaks_responses(results: Results) -> None:
    """Over /v1/responses, whole and streamed."""
    assert results["speaks_responses"] == ["Grüße", "Grüße"]
