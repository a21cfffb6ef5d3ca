"""Hypothesis strategies of every message, built from the annotations: a new field or message is
covered without being named here."""

import enum
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from engine.sampling_params import RepetitionDetection, SamplingParams
from engine.wire import EngineCoreRequest, Message

_DTYPES = ("<u4", "<i4", "<i8", "<f4", "<f2", "<f8", "|u1", "|b1")

INT64 = st.integers(-(2**63), 2**63 - 1)
TOKEN_ID = st.integers(0, 2**31 - 1)
TOKENS = stn.arrays("<u4", st.integers(0, 2000))
_SHAPES = stn.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
ARRAYS = st.sampled_from(_DTYPES).flatmap(
    lambda dtype: stn.arrays(
        dtype, stn.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
    )
)
RAW = st.recursive(
    st.none() | st.booleans() | INT64 | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
).map(lambda value: msgspec.Raw(msgspec.msgpack.encode(value)))


def message_types() -> list[type[Message]]:
    """Every Message that the engine's modules define. Those of `workers.rpc`, which other tests may
    have imported, have tests of their own."""
    ours = [kind for kind in _subclasses(Message) if kind.__module__.startswith("engine.")]
    return sorted(ours, key=lambda kind: kind.__name__)


def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Any valid value of a message type, or of a type that occurs in messages."""
    special = _SPECIAL.get(kind)
    if special is not None:
        return special
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _bounded(args[0], args[1])
    if origin in (Union, types.UnionType):
        return st.one_of(*(messages(arg) for arg in args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(messages(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(messages(args[0]), messages(args[1]), max_size=3)
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return st.builds(kind, **_fields(kind))


def _fields(kind: type[msgspec.Struct]) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: messages(hints[name]) for name in kind.__struct_fields__}


def _bounded(kind: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    if kind is int:
        return st.integers(int(meta.ge or 0), int(meta.le or 0))
    if kind is float:
        return st.floats(meta.ge, meta.le)
    if kind is str:
        return st.text(min_size=meta.min_length or 0, max_size=min(meta.max_length or 20, 20))
    return messages(kind)


def _subclasses(kind: type[Message]) -> Iterator[type[Message]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


_RATE = st.floats(-2.0, 2.0)
_COUNT = st.integers(0, 20)
_TOKEN_IDS = st.lists(TOKEN_ID, max_size=4).map(tuple)

_REPETITION = st.builds(
    RepetitionDetection,
    max_pattern_size=st.integers(9, 256),
    min_pattern_size=st.integers(1, 9),
    min_count=st.integers(2, 1000),
)

_SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    type(None): st.none(),
    bool: st.booleans(),
    int: INT64,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.lists(TOKEN_ID, max_size=3).map(lambda ids: np.asarray(ids, "<u4").tobytes()),
    np.ndarray: ARRAYS,
    msgspec.Raw: RAW,
    RepetitionDetection: _REPETITION,
    SamplingParams: st.builds(
        SamplingParams,
        temperature=st.floats(0.0, 100.0),
        top_p=st.floats(0.0, 1.0, exclude_min=True),
        top_k=st.integers(-1, 2**31 - 1),
        min_p=st.floats(0.0, 1.0),
        seed=st.none() | INT64,
        repetition_penalty=st.floats(0.01, 100.0),
        presence_penalty=_RATE,
        frequency_penalty=_RATE,
        logit_bias=st.none() | st.dictionaries(TOKEN_ID, st.floats(-100.0, 100.0), max_size=4),
        max_tokens=st.none() | st.integers(20, 2**31 - 1),
        min_tokens=_COUNT,
        stop_token_ids=_TOKEN_IDS,
        eos_token_ids=_TOKEN_IDS,
        ignore_eos=st.booleans(),
        logprobs=st.none() | _COUNT,
        prompt_logprobs=st.none() | _COUNT,
        repetition_detection=st.none() | _REPETITION,
        allowed_token_ids=st.none() | st.lists(TOKEN_ID, min_size=1, max_size=4).map(tuple),
    ),
}
# Token ids come in one row of u32, and one of prompt and embeddings is there.
_SPECIAL[EngineCoreRequest] = st.builds(
    EngineCoreRequest,
    **(
        _fields(EngineCoreRequest)
        | {"prompt_token_ids": TOKENS, "output_token_ids": st.none() | TOKENS}
    ),
)
