"""Words that an answer must not hold, as sequences of tokens. Pure; used by `logit_edits`."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class BadWords:
    """Which tokens would complete a sequence that a request must not hold.

    Sequences are kept by what precedes their last token, so a step looks up as many endings of the
    output as there are lengths, however many words there are.

    Args:
        sequences: of token ids; none is empty.
        output: so far.
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]], output: Ids) -> None:
        self._last_ids: dict[tuple[int, ...], list[int]] = {}
        for *beginning, last in sequences:
            self._last_ids.setdefault(tuple(beginning), []).append(last)
        self._lengths = sorted({len(beginning) for beginning in self._last_ids})
        longest = self._lengths[-1]
        start = max(0, len(output) - longest)
        self._ending: deque[int] = deque(output[start:].tolist(), maxlen=longest)

    def append(self, token_id: int) -> None:
        self._ending.append(token_id)

    def banned(self) -> Ids:
        """What must not come next."""
        ending = tuple(self._ending)
        banned: list[int] = []
        for length in self._lengths:
            if length <= len(ending):
                banned += self._last_ids.get(ending[len(ending) - length :], ())
        return np.array(banned, np.int64)
