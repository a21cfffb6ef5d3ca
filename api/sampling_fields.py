"""Fields of a request that say how to sample: what the routes in OpenAI's shapes share. Used by
their bodies."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import msgspec


class SamplingFields(msgspec.Struct, kw_only=True):
    """With the names and meanings of `SamplingParams`, which checks them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """-1 is none, as in vLLM."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[int, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None


Reader = Callable[[SamplingFields, Mapping[str, float]], dict[str, Any]]


def reader(*others: str) -> Reader:
    """Makes a function that returns the fields that a request gives, by their names, and the
    defaults of others.

    Args:
        others: fields of a route that say how to sample there.
    """
    names = (*SamplingFields.__struct_fields__, *others)
    values_of = attrgetter(*names)

    def read(body: SamplingFields, defaults: Mapping[str, float]) -> dict[str, Any]:
        values = zip(names, values_of(body), strict=True)
        given = {name: value for name, value in values if value is not None}
        if body.seed == -1:
            del given["seed"]
        return {**defaults, **given} if defaults else given

    return read
