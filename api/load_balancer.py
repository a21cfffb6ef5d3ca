"""Which data-parallel rank gets the next request. Pure: counts in, index out.

The score of a rank is what it reported to have waiting and running, plus what this API server has
sent it since. Used by `engine_client`; a single rank needs no choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class RankLoad:
    """What is known of one rank. `engine_client` keeps it up to date."""

    num_waiting: int = 0
    num_running: int = 0
    num_unreported: int = 0
    """Sent by this API server after the rank's last report came."""
    is_up: bool = True

    @property
    def score(self) -> int:
        return self.num_waiting + self.num_running + self.num_unreported

    def report(self, num_waiting: int, num_running: int) -> None:
        """Take over the rank's own counts.

        NOTE: approximate. A request that was on its way when the report was made is in neither
        count until the next report, a step later. Between bursts that evens out; a report does not
        say which requests it has seen.
        """
        self.num_waiting = num_waiting
        self.num_running = num_running
        self.num_unreported = 0


def choose(loads: Sequence[RankLoad]) -> int | None:
    """Return the rank with the lowest score, the first of equal ones, or None if none is up."""
    up = (index for index, load in enumerate(loads) if load.is_up)
    return min(up, key=lambda index: loads[index].score, default=None)
