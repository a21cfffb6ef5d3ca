"""Every struct of both wires, and of the utility calls, comes back as it was sent."""

import hypothesis
import pytest
from hypothesis import strategies as st

import engine.codec
import engine.step
import engine.utility
import engine.wire
from engine.codec import Decoder, Encoder
from engine.sampling_params import RepetitionDetection, SamplingParams
from engine.wire import Message
from tests.helpers.messages import same
from tests.helpers.strategies import message_types, messages

MODULES = (engine.wire, engine.step, engine.utility)
TYPES = [*message_types(), SamplingParams, RepetitionDetection]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_struct_round_trips(kind: type[Message]) -> None:
    """Any valid value is equal to itself after encoding and decoding, arrays included."""
    encode, decode = Encoder().encode, Decoder[Message](kind).decode

    @hypothesis.settings(max_examples=25)
    @hypothesis.given(messages(kind))
    def check(message: Message) -> None:
        assert same(decode(encode(message)), message)

    check()


def test_the_round_trip_covers_every_struct_of_our_modules() -> None:
    """The messages are found by walking, so that a new one cannot be forgotten."""
    defined = {
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }

    assert defined <= set(TYPES)
    assert len(defined) > 25


@hypothesis.settings(max_examples=200)
@hypothesis.given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_packed_tokens_round_trip(token_ids: list[int]) -> None:
    """Any u32 token ids survive packing."""
    assert engine.codec.unpack_tokens(engine.codec.pack_tokens(token_ids)) == token_ids
