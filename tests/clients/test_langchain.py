"""LangChain's ChatOpenAI, in an environment of its own."""

import pytest

from tests.clients.results import Results
from tests.clients.servers import TOOL_CALLS

CLIENT = "langchain"
SERVERS = ("echo", "tools", "demo")

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


def test_makes_the_model_call_a_tool(results: Results) -> None:
    """`tool_choice` any and by name, on a real model."""
    assert results["makes_the_model_call"] == [["Animal"], ["Animal"]]


def test_structures_output(results: Results) -> None:
    """`with_structured_output` by a schema and by a tool, into a Pydantic class."""
    it = results["structures_output"]

    assert {it[method]["name"] for method in it} <= {"cat", "dog", "owl"}
    assert set(it) == {"json_schema", "function_calling"}
    assert results["streams_structured_output"]["legs"] in range(10)


def test_speaks_responses(results: Results) -> None:
    """Over /v1/responses, whole and streamed."""
    assert results["speaks_responses"] == ["Grüße", "Grüße"]
