"""Counter-based noise: the uniform numbers of a row are a pure function of (key, tokens so far).

Used by `sampler`. There is no generator whose state could be lost: a request draws the same numbers
whatever else is in the batch. With a seed it does so too after preemption, and when another process
continues it; without one it gets a new key then, and goes on with other numbers. The function is
SplitMix64, whose stream of one key has period 2**64.

Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


def key_of_seed(seed: int) -> int:
    """The key of a request with that seed. Neighbouring seeds have unrelated keys."""
    return int(_mix(np.array([seed & _MASK], np.uint64) + _GOLDEN)[0])


def nth_key(key: int, n: int) -> int:
    """The `n`th of a sequence of unrelated keys that starts from `key`."""
    return int(_draw(np.array([key], np.uint64), np.array([n], np.uint64))[0])


def uniforms(
    keys: NDArray[np.uint64], counters: NDArray[np.int64], width: int
) -> NDArray[np.float64]:
    """Return `width` numbers per row, `[n, width]`, strictly between 0 and 1.

    Args:
        keys: `[n]`, from `key_of_seed`.
        counters: `[n]`, how many draws of the key came before.
        width: of every draw of a key.
    """
    places = counters[:, None] * width + np.arange(width)
    # 52 bits and a half: every value is exact, and neither 0 nor 1 occurs.
    bits = _draw(keys[:, None], places.astype(np.uint64)) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _draw(keys: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return _mix(keys + (counters + np.uint64(1)) * _GOLDEN)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
