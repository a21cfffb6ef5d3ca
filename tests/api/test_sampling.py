"""What users may ask of sampling, and what of it reaches the engine."""

from typing import Any

import pytest

from api.limits import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from api.sampling import SamplingParams
from engine.codec import Decoder, Encoder
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams as EngineSamplingParams


def test_only_what_the_engine_needs_travels() -> None:
    """Stop strings and the like stay here: the engine's struct arrives, with nothing added."""
    params = SamplingParams(temperature=0.5, top_k=3, stop=("END",), n=2, seed=7)

    frames = Encoder().encode(params.for_engine())

    assert Decoder(EngineSamplingParams).decode(frames) == EngineSamplingParams(
        temperature=0.5, top_k=3, seed=7, max_tokens=16
    )
    assert not any(b"END" in bytes(frame) for frame in frames)


def test_each_continuation_has_a_seed_of_its_own() -> None:
    """Or all `n` would be equal; sums stay within a seed's 64 bits."""
    params = SamplingParams(seed=2**63 - 1, n=3)

    seeds = [params.for_engine(choice).seed for choice in range(3)]

    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]


def test_lists_and_single_stop_strings_are_taken() -> None:
    """As vLLM's users write them."""
    params = SamplingParams(stop="a", stop_token_ids=[1, 2], allowed_token_ids=[3])  # type: ignore[arg-type]

    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a",), (1, 2), (3,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "warm"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("n", 0),
        ("n", 1025),
        ("n", True),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("ignore_eos", 1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
        ("stop", "x" * (MAX_STOP_STRING_CHARS + 1)),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2**63]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: 101}),
        ("allowed_token_ids", []),
        ("repetition_detection", 4),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    """Whatever its type: the error names the field."""
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{field: value})

    assert refused.value.param == field
    assert len(str(refused.value)) < 300
