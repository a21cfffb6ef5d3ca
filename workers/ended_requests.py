"""Requests whose last token was their end, as a rank sees it before the engine core does.

A step may be planned before the tokens of the last one are known (`engine.step.OWN_TOKEN`). If all
that it runs has ended with those tokens, nobody wants its result, and it is left out. So planning
ahead costs a lone request nothing at its end. Used by `input_batch`; `engine.stop` decides.
"""

from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from engine.sampling_params import SamplingParams

_NONE = -1
"""Fills up the ids of a row: no token."""


class EndedRequests:
    """Knows by which tokens each row ends. `num_rows` is the size of the batch."""

    def __init__(self, num_rows: int) -> None:
        self._ending_ids = np.full((num_rows, 1), _NONE, np.int64)
        self._min_num_tokens = np.zeros(num_rows, np.int64)
        self._ended: set[str] = set()

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Take note of the request that has got `row`."""
        ending = params.ending_token_ids
        if len(ending) > self._ending_ids.shape[1]:
            more = len(ending) - self._ending_ids.shape[1]
            self._ending_ids = np.pad(self._ending_ids, ((0, 0), (0, more)), constant_values=_NONE)
        self._ending_ids[row] = _NONE
        self._ending_ids[row, : len(ending)] = ending
        self._min_num_tokens[row] = num_prompt_tokens + params.min_tokens

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._ended.discard(request_id)

    def note(
        self,
        request_ids: Sequence[str],
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
    ) -> None:
        """Look at new tokens, one of each request, and at how many it has with that one."""
        is_ending = (self._ending_ids[rows] == token_ids[:, None]).any(-1)
        is_ending &= num_tokens >= self._min_num_tokens[rows]
        for index in is_ending.nonzero()[0].tolist():
            self._ended.add(request_ids[index])

    def include(self, request_ids: Set[str]) -> bool:
        """Whether all of them have ended."""
        return request_ids <= self._ended
