"""The masks of one step, of all its requests with a structured output. Used by `core`."""

from collections.abc import Sequence

import numpy as np

from engine.request import Request
from engine.step import TokenMasks


def fill(step: int, requests: Sequence[Request], vocab_size: int) -> TokenMasks:
    """Return what `requests` may sample in `step`. One that is at fault may sample anything: what
    comes of it will not be accepted."""
    words = np.empty((len(requests), -(-vocab_size // 32)), "<u4")
    request_ids: list[str] = []
    for request in requests:
        assert request.matcher is not None
        if request.matcher.fill(words[len(request_ids)]):
            request_ids.append(request.request_id)
    return TokenMasks(step, request_ids, words[: len(request_ids)])
