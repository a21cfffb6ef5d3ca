"""Thoughts that may not go on for ever: after so many tokens the one that ends them is the only one
that can come. Pure; used by `logit_edits`."""

from collections import deque
from collections.abc import Iterable

from engine.sampling_params import ThinkingBudget


class ThoughtLimit:
    """Follows the output of one request through its thoughts.

    Args:
        budget: of the request.
        output: tokens so far.
    """

    def __init__(self, budget: ThinkingBudget, output: Iterable[int]) -> None:
        self._budget = budget
        self._num_tokens: int | None = 0 if budget.is_open else None
        """Of the thought so far; None outside of one."""
        self._ending: deque[int] = deque(maxlen=len(budget.start_token_ids))
        for token_id in output:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take note of a new output token."""
        self._ending.append(token_id)
        if token_id == self._budget.end_token_id:
            self._num_tokens = None
        elif self._num_tokens is not None:
            self._num_tokens += 1
        elif tuple(self._ending) == self._budget.start_token_ids:
            self._num_tokens = 0

    @property
    def forced(self) -> int | None:
        """The token that has to come next; None: any may."""
        if self._num_tokens is None or self._num_tokens < self._budget.max_tokens:
            return None
        return self._budget.end_token_id
