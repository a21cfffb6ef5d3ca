"""Comparing messages: arrays in them have no single truth value, and raw msgpack no equality."""

from typing import Any

import msgspec
import numpy as np


def same(a: Any, b: Any) -> bool:
    """Whether two messages are equal in type and content, arrays also in dtype and shape."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return (
            isinstance(a, np.ndarray)
            and isinstance(b, np.ndarray)
            and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, msgspec.Struct):
        return all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, msgspec.Raw):
        return bytes(a) == bytes(b)
    return bool(a == b)
