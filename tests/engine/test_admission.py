"""What is let in: the engine core's own check, whatever the API server has done."""

from typing import Any

import msgspec
import numpy as np
import pytest

from engine.admission import check
from engine.errors import (
    ContextLengthError,
    InvalidRequestError,
    RequestError,
    UnsupportedFieldError,
)
from engine.sampling_params import SamplingParams
from engine.wire import EngineCoreRequest, LoRARequest, MultiModalFeature, PoolingParams
from tests.helpers.engine_core import make_request


def refusal(request: EngineCoreRequest, **changes: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(msgspec.structs.replace(request, **changes), max_model_len=16, vocab_size=10)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_request", LoRARequest("a", 1, "/a")),
        ("mm_features", [MultiModalFeature("image", "cat", 0, 1)]),
        ("pooling_params", PoolingParams("embed")),
    ],
)
def test_a_field_that_cannot_be_served_is_named(field: str, value: object) -> None:
    """On the wire, and refused: never silently left out."""
    error = refusal(make_request("r"), **{field: value})
    assert isinstance(error, UnsupportedFieldError)
    assert error.param == field


@pytest.mark.row("S-14")
def test_prompt_embeds_are_named_too() -> None:
    """An array, which has no truth value of its own."""
    error = refusal(make_request("r"), prompt_embeds=np.zeros((2, 3), dtype="<f4"))
    assert isinstance(error, UnsupportedFieldError)
    assert error.param == "prompt_embeds"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_token_ids", np.asarray([], dtype="<u4")),
        ("prompt_token_ids", np.asarray([10], dtype="<u4")),
        ("output_token_ids", np.asarray([2**32 - 1], dtype="<u4")),
        ("sampling_params", None),
    ],
)
def test_a_wrong_value_is_refused_and_named(field: str, value: object) -> None:
    """Nothing of it reaches the scheduler or the workers."""
    error = refusal(make_request("r"), **{field: value})
    assert isinstance(error, InvalidRequestError)
    assert error.param == field


@pytest.mark.row("S-52")
def test_sampling_params_must_fit_the_vocabulary() -> None:
    """A token id that the model lacks would index past its logits."""
    error = refusal(make_request("r"), sampling_params=SamplingParams(stop_token_ids=(10,)))
    assert error.param == "stop_token_ids"


@pytest.mark.row("F-41", "F-33")
def test_a_request_that_can_never_run_is_refused_at_once() -> None:
    """F-41: with no room for one more token it would wait for ever."""
    assert isinstance(refusal(make_request("r", 16)), ContextLengthError)
    assert isinstance(refusal(make_request("r", 12, output=[1] * 4)), ContextLengthError)
    check(make_request("r", 15), max_model_len=16, vocab_size=10)


def test_a_continuation_with_nothing_left_to_generate_is_refused() -> None:
    """max_tokens counts the tokens that were generated elsewhere."""
    assert refusal(make_request("r", 4, output=[1, 1], max_tokens=2)).param == "output_token_ids"
    check(make_request("r", 4, output=[1, 1], max_tokens=3), max_model_len=16, vocab_size=10)
