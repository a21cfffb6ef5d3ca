"""Which data-parallel rank gets the next request. Pure: counts in, index out.

The score of a rank is what it reported to have waiting and running, plus what this API server has
sent it since and not got back. Used by `engine_client`; a single rank needs no choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class RankLoad:
    """What is known of one rank. `engine_client` keeps it up to date."""

    num_waiting: int = 0
    num_running: int = 0
    num_unreported: int = 0
    """Sent by this API server after the rank's last report."""
    is_up: bool = True

    @property
    def score(self) -> int:
        return self.num_waiting + self.num_running + self.num_unreported

    def report(self, num_waiting: int, num_running: int) -> None:
        """A report counts everything that was sent before it was made."""
        self.num_waiting = num_waiting
        self.num_running = num_running
        self.num_unreported = 0


def choose(loads: Sequence[RankLoad], first: int = 0) -> int | None:
    """Return the rank with the lowest score, or None if none is up.

    Args:
        loads: by rank.
        first: where to start looking, so that API servers with equal counts do not all pick rank 0.
    """
    num = len(loads)
    order = ((first + i) % num for i in range(num))
    return min((i for i in order if loads[i].is_up), key=lambda i: loads[i].score, default=None)
