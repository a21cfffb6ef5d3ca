"""What the library takes for structured output: vLLM's `StructuredOutputsParams`."""

from typing import Any

import pytest

from api import SamplingParams, StructuredOutputsParams
from engine.errors import InvalidRequestError
from tests.helpers.grammar_walk import Language

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def test_params_reach_the_engine_of_each_continuation() -> None:
    """In vLLM's shape, with Python's objects."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=PERSON))
    sent = params.for_engine(1).structured_output

    assert sent is not None
    assert Language(sent).has('{"name": "Anna", "age": 7}')
    assert not Language(sent).has('{"age": 7}')


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"regex": 7},
        {"choice": "ab"},
        {"json": {"type": {1, 2}}},
        {"json": {"type": "banana"}},
        {"json_object": 1},
    ],
)
def test_broken_params_are_refused(given: dict[str, Any]) -> None:
    """When the params are made."""
    with pytest.raises(InvalidRequestError):
        StructuredOutputsParams(**given)


def test_library_takes_no_other_object() -> None:
    """A dict is a mistake that would otherwise go unnoticed."""
    with pytest.raises(InvalidRequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
