"""`instructor`, in an environment of its own, with a real model."""

import pytest

from tests.clients.results import Results

CLIENT = "instructor"
SERVERS = ("demo",)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("way", ["by_a_tool", "by_a_schema", "asynchronously"])
def test_fills_a_model_at_the_first_try(results: Results, way: str) -> None:
    """With no retries: the server has the model keep to the schema."""
    assert results[way]["name"] in ("cat", "dog", "owl")
    assert results[way]["legs"] in range(10)


def test_fills_a_model_in_parts(results: Results) -> None:
    """`create_partial` shows the object as it grows."""
    is_growing, last = results["in_parts"]

    assert is_growing
    assert last["name"] in ("cat", "dog", "owl")
