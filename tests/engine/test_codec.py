"""Arrays beside the body: no copies, indices once and in order, sizes checked before use."""

from typing import Any

import msgspec
import numpy as np
import pytest

from engine.codec import (
    INLINE_BYTES,
    MAX_ARRAY_BYTES,
    MAX_BODY_BYTES,
    Array,
    Decoder,
    Encoder,
    pack_tokens,
    token_array,
    unpack_tokens,
)
from engine.errors import WireError
from engine.wire import EngineCoreRequest, Message
from tests.helpers.api_peer import make_request


class Pair(Message, frozen=True):
    a: np.ndarray
    b: np.ndarray | None = None


LARGE = np.arange(INLINE_BYTES, dtype="<u4")
DECODE = Decoder[Pair](Pair).decode


def body(*values: Any) -> bytes:
    return msgspec.msgpack.encode(values)


def test_large_arrays_are_sent_and_received_where_they_lie() -> None:
    """Neither side copies: the frame is the array's memory, and the array is the frame's."""
    frames = Encoder().encode(Pair(LARGE))
    assert np.shares_memory(np.frombuffer(frames[1], dtype="<u4"), LARGE)

    received = bytes(frames[1])
    pair = DECODE([frames[0], received])

    assert np.shares_memory(pair.a, np.frombuffer(received, dtype="<u4"))
    assert not pair.a.flags.writeable


def test_encoding_into_a_buffer_reuses_it() -> None:
    """The body is written into the caller's buffer, whatever was there, and arrays stay apart."""
    encoder, buffer = Encoder(), bytearray(b"old" * 1000)

    frames = encoder.encode_into(Pair(LARGE, LARGE), buffer)

    assert frames[0] is buffer
    assert [bytes(f) for f in frames] == [bytes(f) for f in encoder.encode(Pair(LARGE, LARGE))]


def test_small_arrays_travel_inside_the_body() -> None:
    """Below 4 KiB an array needs no frame; the first byte over takes one."""
    largest_inline = np.zeros(INLINE_BYTES - 1, dtype="|u1")

    assert len(Encoder().encode(Pair(largest_inline))) == 1
    assert len(Encoder().encode(Pair(np.zeros(INLINE_BYTES, dtype="|u1")))) == 2


@pytest.mark.parametrize(
    "array",
    [
        LARGE.reshape(64, 64)[::2, ::3],
        np.asfortranarray(LARGE.reshape(64, 64)),
        np.asarray(3.5, dtype="<f4"),
        np.zeros((0, 7), dtype="<f4"),
        np.asarray([True, False]),
        LARGE[:10],
    ],
    ids=["strided", "fortran", "scalar", "empty", "bool", "slice"],
)
def test_arrays_of_any_layout_arrive_equal(array: Array) -> None:
    """What is not contiguous is copied while encoding; shape and type stay."""
    received = DECODE([bytes(f) for f in Encoder().encode(Pair(array))]).a

    assert (received.dtype, received.shape) == (array.dtype, array.shape)
    assert np.array_equal(received, array)


def test_an_array_at_an_odd_address_is_copied() -> None:
    """ZeroMQ may hand out a frame at any address; what reads the array may need an even one."""
    memory = bytearray(1 + LARGE.nbytes)
    memory[1:] = LARGE.tobytes()
    offset = 1 if np.frombuffer(memory, dtype="|u1").ctypes.data % 4 == 0 else 0
    frame = memoryview(memory)[offset : offset + LARGE.nbytes]

    pair = DECODE([body(("<u4", LARGE.shape, 1)), frame])

    assert pair.a.flags.aligned
    assert not pair.a.flags.writeable


@pytest.mark.parametrize(
    "value", [np.asarray(["text"]), np.asarray([None]), np.zeros(2, ">u4"), np.zeros(2, "c16")]
)
def test_arrays_of_other_types_are_not_sent(value: Array) -> None:
    """Objects, strings, big-endian and complex numbers have no place on the wire."""
    with pytest.raises(TypeError, match="cannot send an array of"):
        Encoder().encode(Pair(value))


def test_only_structs_and_arrays_are_sent() -> None:
    """Nothing is turned into bytes by guessing."""
    with pytest.raises(TypeError, match="cannot send a complex"):
        Encoder().encode(Pair(1j))  # type: ignore[arg-type]


FRAME = LARGE.tobytes()
SHAPE = LARGE.shape


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "without a body"),
        ([body(("<u4", SHAPE, 1))], "array frame 1 where 1 of 0 is due"),
        ([body(("<u4", SHAPE, 0)), FRAME], "array frame 0"),
        ([body(("<u4", SHAPE, -1)), FRAME], "array frame -1"),
        ([body(("<u4", SHAPE, 2)), FRAME, FRAME], "array frame 2 where 1"),
        ([body(("<u4", SHAPE, 1), ("<u4", SHAPE, 1)), FRAME], "array frame 1 where 2"),
        ([body(("<u4", SHAPE, 2), ("<u4", SHAPE, 1)), FRAME, FRAME], "array frame 2 where 1"),
        ([body(("<u4", SHAPE, 1)), FRAME, FRAME], "2 array frames came, 1 are used"),
        ([body(("<u4", (3,), b"\0" * 12)), FRAME], "1 array frames came, 0 are used"),
        ([body(("<u4", (len(LARGE) + 1,), 1)), FRAME], "came with 16384"),
        ([body(("<u4", (len(LARGE) - 1,), 1)), FRAME], "came with 16384"),
        ([body(("<u4", (2,), b"\0" * 7))], "2 x 4 bytes came with 7"),
        ([body(("<u4", (-1,), b""))], "non-negative"),
        ([body(("<u4", (1.5,), b""))], "non-negative"),
        ([body(("<u4", (True,), b"\0" * 4))], "non-negative"),
        ([body(("<u4", 3, b""))], "dimensions"),
        ([body(("<u4", (1, 1, 1, 1, 1), b"\0" * 4))], "dimensions"),
        ([body(("<u4", (2**40, 2**40), b""))], f"over {MAX_ARRAY_BYTES}"),
        ([body(("<f8", (MAX_ARRAY_BYTES // 8 + 1,), b""))], f"over {MAX_ARRAY_BYTES} bytes"),
        ([body(("<f8", (MAX_ARRAY_BYTES // 8,), b""))], "came with 0"),
        ([body(("<u4", (0, 2**62, 2**62), b""))], ""),
        ([body(("<u4", (1,), "text"))], "bytes or a frame index"),
        ([body(("<u4", (1,), True))], "bytes or a frame index"),
        ([body(("O", (1,), b"\0" * 8))], "unknown dtype 'O'"),
        ([body((">u4", (1,), b"\0" * 4))], "unknown dtype"),
        ([body((7, (1,), b"\0" * 4))], "unknown dtype"),
        ([body(("<u4", (1,)))], r"\[dtype, shape, data\]"),
        ([body("text")], r"\[dtype, shape, data\]"),
        ([body(("<u4", (1,), msgspec.msgpack.Ext(1, b"abcd")))], "bytes or a frame index"),
        ([b"\xc1"], "undecodable"),
        ([b""], "truncated"),
        ([b"\x91" * 100_000], "recursion"),
        ([b"\x00" * (MAX_BODY_BYTES + 1)], "is the most"),
    ],
)
def test_broken_arrays_are_refused(frames: list[bytes], message: str) -> None:
    """Every way to lie about an array ends in a WireError, before the data is touched."""
    with pytest.raises(WireError, match=f"(?i){message}"):
        DECODE(frames)


def test_a_decoder_is_usable_after_a_broken_message() -> None:
    """Nothing of a refused message stays in the decoder."""
    decode = Decoder[Pair](Pair).decode
    with pytest.raises(WireError):
        decode([body(("<u4", SHAPE, 1), ("<u4", SHAPE, 7)), FRAME, FRAME])

    assert np.array_equal(decode([body(("<u4", SHAPE, 1)), FRAME]).a, LARGE)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e9])
def test_sampling_parameters_out_of_bounds_do_not_decode(field: str, value: float) -> None:
    """Bounds hold on this side of the wire too, whatever the peer has checked."""
    request = msgspec.msgpack.decode(bytes(Encoder().encode(make_request("r"))[0]))
    request[3][request_field(field)] = value

    with pytest.raises(WireError, match=field):
        Decoder(EngineCoreRequest).decode([msgspec.msgpack.encode(request)])


def request_field(name: str) -> int:
    params = make_request("r").sampling_params
    assert params is not None
    return params.__struct_fields__.index(name)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, ""),  # request_id
        (0, "x" * 513),
        (1, None),  # neither prompt_token_ids nor prompt_embeds
        (1, ["<i8", [1], b"\0" * 8]),
        (1, ["<u4", [1, 1], b"\0" * 4]),
        (5, float("nan")),  # arrival_time
        (5, float("inf")),
        (7, "s" * 1025),  # cache_salt
        (8, -1),  # data_parallel_rank
        (8, 2**16),
        (10, -1),  # client_index
        (12, 2**63),  # priority
        (13, {"k": "v" * 1025}),  # trace_headers
        (14, ["<f4", [1], b"\0" * 4]),  # output_token_ids
    ],
)
def test_request_fields_out_of_bounds_do_not_decode(index: int, value: object) -> None:
    """Ids, times, ranks and names are bounded; token ids are one row of u32."""
    values = msgspec.msgpack.decode(bytes(Encoder().encode(make_request("r"))[0]))
    values[index] = value

    with pytest.raises(WireError):
        Decoder(EngineCoreRequest).decode([msgspec.msgpack.encode(values)])


def test_token_helpers_agree_with_numpy() -> None:
    """One token and many pack to the same bytes as a u32 array; odd lengths are refused."""
    for tokens in ([], [7], [0, 2**32 - 1, 5]):
        assert pack_tokens(tokens) == token_array(tokens).tobytes()
        assert unpack_tokens(pack_tokens(tokens)) == tokens
    with pytest.raises(WireError, match="no u32"):
        unpack_tokens(b"\0" * 6)
