"""Structs to frames and back, with large arrays out of band. Used by both wires; knows no sockets.

A message is one msgpack body and any number of array frames. An array inside the body is
`[dtype, shape, data]`, where `data` is the array's bytes when they are few, else the index of the
frame that holds them:

    body                                        frame 1            frame 2
    [..., ["<u4", [100000], 1], ["<f4", …, 2]]  400,000 bytes      …

Frame indices start at 1 (0 is the body), appear once each and in order, and sizes are checked
before use. Nothing is copied on either side: the encoder hands out views of the arrays, the decoder
arrays that are views of the frames (read only). Keep an array unchanged until its message has been
sent. Encoders and decoders are cheap to use, not thread-safe.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from engine.errors import RequestError, WireError

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | bytearray | memoryview

INLINE_BYTES = 4096
"""Arrays below this travel inside the body: a frame of its own costs more than copying them."""

MAX_BODY_BYTES = 16 << 20
"""A body is small, since arrays travel beside it: a larger one is neither sent nor read, unless
`Encoder` and `Decoder` are told otherwise. What is decoded may take fifty times as much memory, if
a peer wants it to: a byte is an empty list."""

MAX_DIMENSIONS = 4
MAX_ARRAY_BYTES = 1 << 30
"""As much as a frame may have (`sockets.MAX_MESSAGE_BYTES`)."""

# Little-endian, fixed size, no objects. The code is numpy's, so both sides can name it to each
# other.
_DTYPES = {
    code: np.dtype(code) for code in ("<u4", "<i4", "<i8", "<f4", "<f2", "<f8", "|u1", "|b1")
}

# RequestError: sampling parameters check themselves, also when they are decoded.
_UNDECODABLE = (
    msgspec.DecodeError,
    RequestError,
    RecursionError,
    ValueError,
    TypeError,
    OverflowError,
)


class Encoder:
    """Encodes any message into frames.

    Args:
        max_body_bytes: what the receiver takes.

    Raises:
        WireError: body or array are larger than the receiver takes.
        TypeError: something in the message is neither struct nor array.
    """

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._arrays: list[memoryview] = []

    def encode(self, message: object) -> list[bytes | memoryview]:
        """Return the body and the frames of the arrays inside it."""
        self._arrays = []
        body = self._encoder.encode(message)
        _check_body(body, self._max_body_bytes)
        return [body, *self._arrays]

    def encode_into(self, message: object, buffer: bytearray) -> list[bytearray | memoryview]:
        """The same, with the body written into `buffer`, which is resized to fit and must outlive
        the frames."""
        self._arrays = []
        self._encoder.encode_into(message, buffer)
        _check_body(buffer, self._max_body_bytes)
        return [buffer, *self._arrays]

    def _encode_array(self, value: object) -> object:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}: only structs and arrays travel")
        code = value.dtype.str
        if code not in _DTYPES:
            raise TypeError(f"cannot send an array of {value.dtype}: one of {', '.join(_DTYPES)}")
        data = np.ascontiguousarray(value).data.cast("B") if value.size else memoryview(b"")
        if data.nbytes < INLINE_BYTES:
            return (code, value.shape, data)
        if data.nbytes > MAX_ARRAY_BYTES:
            raise WireError(f"an array of {data.nbytes} bytes; {MAX_ARRAY_BYTES} is the most")
        self._arrays.append(data)
        return (code, value.shape, len(self._arrays))


class Decoder(Generic[T]):
    """Decodes the frames of one message type.

    Args:
        message_type: says what may be in a message, and how deep: what is not in it is refused
            where it begins, extension types among it.
        max_body_bytes: of a body that is decoded at all.

    Raises:
        WireError: the frames break the protocol in any way: malformed msgpack, wrong types, values
            out of bounds, arrays whose size, frame or type is not what they say, nesting that is
            too deep.
    """

    def __init__(self, message_type: type[T] | Any, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            message_type, dec_hook=self._decode_array
        )
        self._frames: Sequence[Buffer] = ()
        self._next_frame = 1

    def decode(self, frames: Sequence[Buffer]) -> T:
        """Return the message. Arrays in it are read-only views of `frames`."""
        if not frames:
            raise WireError("a message without a body")
        _check_body(frames[0], self._max_body_bytes)
        self._frames = frames
        self._next_frame = 1
        try:
            message = self._decoder.decode(frames[0])
        except _UNDECODABLE as error:
            raise WireError(f"undecodable message: {str(error)[:200]}") from error
        finally:
            used, self._frames = self._next_frame, ()
        if used != len(frames):
            raise WireError(f"{len(frames) - 1} array frames came, {used - 1} are used")
        return message

    def _decode_array(self, expected: type, value: object) -> object:
        if expected is not np.ndarray:
            raise WireError(f"no decoding of {expected}")
        if not isinstance(value, list) or len(value) != 3:
            raise WireError("an array is [dtype, shape, data]")
        code, shape, data = value
        dtype = _DTYPES.get(code) if isinstance(code, str) else None
        if dtype is None:
            raise WireError(f"unknown dtype {str(code)[:20]!r}")
        size = _checked_size(shape, dtype.itemsize)
        if isinstance(data, int) and not isinstance(data, bool):
            data = self._take_frame(data)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise WireError("array data is bytes or a frame index")
        view = memoryview(data)
        if view.nbytes != size * dtype.itemsize:
            raise WireError(f"an array of {size} x {dtype.itemsize} bytes came with {view.nbytes}")
        array = np.frombuffer(view, dtype=dtype).reshape(shape)
        if not array.flags.aligned:
            # ZeroMQ hands out frames of a few KiB from inside its receive buffer, at any address.
            array = array.copy()
        array.flags.writeable = False
        return array

    def _take_frame(self, index: int) -> memoryview:
        if index != self._next_frame or index >= len(self._frames):
            raise WireError(
                f"array frame {index} where {self._next_frame} of {len(self._frames) - 1} is due"
            )
        self._next_frame += 1
        return memoryview(self._frames[index])


def _check_body(body: Buffer, most: int) -> None:
    if len(body) > most:
        raise WireError(f"a body of {len(body)} bytes; {most} is the most")


def _checked_size(shape: object, item_bytes: int) -> int:
    """Number of elements of a shape that came from a peer, for elements of `item_bytes`."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise WireError(f"an array shape has at most {MAX_DIMENSIONS} dimensions")
    size = 1
    for length in shape:
        if type(length) is not int or length < 0:
            raise WireError("an array dimension is a non-negative integer")
        size *= length
        if size * item_bytes > MAX_ARRAY_BYTES:
            raise WireError(f"an array of over {MAX_ARRAY_BYTES} bytes")
    return size


def token_array(token_ids: Sequence[int]) -> Array:
    """Token ids as they travel: `[num_tokens]` little-endian u32."""
    return np.asarray(token_ids, dtype="<u4")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """A few token ids as raw little-endian u32: cheaper than an array where one token is the usual
    case."""
    if len(token_ids) == 1:
        return token_ids[0].to_bytes(4, "little")
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    if len(data) == 4:
        return [int.from_bytes(data, "little")]
    if len(data) % 4:
        raise WireError(f"{len(data)} bytes are no u32 token ids")
    tokens: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return tokens
