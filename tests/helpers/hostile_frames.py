"""Messages with random changes, the same on every run: what a peer sends that has gone wrong, or
wants to do harm."""

import random
from collections.abc import Callable


def mutate(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """One to three random changes to a message, mostly inside one frame."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        if not frames:
            break
        i = rng.randrange(len(frames))
        if rng.random() < 0.9:
            frames[i] = rng.choice(BYTE_CHANGES)(rng, frames[i])
        else:
            rng.choice(FRAME_CHANGES)(rng, frames, i)
    return frames


def _flip(rng: random.Random, data: bytes) -> bytes:
    i = rng.randrange(len(data) + 1)
    return data[:i] + bytes([rng.randrange(256)]) + data[i + 1 :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert(rng: random.Random, data: bytes) -> bytes:
    i = rng.randrange(len(data) + 1)
    return data[:i] + rng.choice(HOSTILE) + data[i:]


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    i, hostile = rng.randrange(len(data) + 1), rng.choice(HOSTILE)
    return data[:i] + hostile + data[i + len(hostile) :]


def _random(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.randrange(64))


HOSTILE = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map of that size
    b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
    b"\xdb\xff\xff\xff\xff",  # and of text
    b"\xc9\x00\x00\x00\x01\x01x",  # extension types
    b"\xd4\xff\x00",
    b"\x91" * 3000,  # nesting
    b"\x81\xa1k" * 2000,
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # infinity
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",  # 2**64 - 1
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",  # -2**63
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xc0",
    b"\xc1",
    b"\x80",
    b"\x90",
]

BYTE_CHANGES: list[Callable[[random.Random, bytes], bytes]] = [
    _flip,
    _cut,
    _insert,
    _overwrite,
    _random,
]

FRAME_CHANGES: list[Callable[[random.Random, list[bytes], int], None]] = [
    lambda rng, frames, i: frames.__delitem__(i),
    lambda rng, frames, i: frames.insert(i, rng.randbytes(rng.randrange(32))),
    lambda rng, frames, i: frames.append(frames[i]),
    lambda rng, frames, i: rng.shuffle(frames),
]
