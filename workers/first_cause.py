"""Which of several signs of trouble came first. Pure.

When one rank goes, the others follow within milliseconds: their collectives fail, and they report
it or abort. Operators need the one that began.
"""

import signal
from collections.abc import Mapping

from workers.rpc import Failed

# When a peer has gone, collective libraries abort.
_CONSEQUENCES = (-signal.SIGABRT,)


def choose(deaths: Mapping[int, int], failures: Mapping[int, Failed]) -> int:
    """Return the rank with which it began.

    Args:
        deaths: exit codes of the ranks that have ended; negative ones are signals.
        failures: what ranks have reported. Each of them ends after that, so its death says nothing.
    """
    unexplained = [rank for rank in deaths if rank not in failures]
    # Killed from outside, or crashed: no failure of a peer does that, so it was there before.
    for rank in unexplained:
        if deaths[rank] < 0 and deaths[rank] not in _CONSEQUENCES:
            return rank
    if failures:
        return min(failures, key=lambda rank: failures[rank].at_s)
    return unexplained[0]
