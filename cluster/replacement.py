"""Whether a rank that is lost is started anew, when, and under which epoch. Pure: losses and times
in, verdicts out. Used by `replacer`, which has the threads and the clock.

    up --loss--> restart after a delay --> starting --READY--> up …
                              ^               |
                              +-----loss------+   three times at most

The first loss in a while is made good at once; a rank that is lost again and again has to wait
longer each time, so that starting it does not cost the others all their processor time. One that
does not come up at all will not do so at the fourth try: then the server ends, as it does in the
default mode, and whoever started it learns why. The same where a loss leaves nobody who could take
over the streams and nobody on the way either.
"""

from collections import deque
from dataclasses import dataclass, field

MAX_FAILED_STARTS = 3
"""Of one rank, in a row."""

CALM_S = 120.0
"""A rank that has not been lost for so long is started at once when it is."""

FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0
"""Before the second start within that time, doubled for each further one, up to the second
figure."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the rank anew."""

    epoch: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class GoOn:
    """Do without the rank: the server is ending, and the others can finish what it had."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the server."""

    reason: str | None
    """None: what the loss itself says is enough."""


Verdict = Restart | GoOn | GiveUp


@dataclass(slots=True)
class _Rank:
    epoch: int = 0
    is_up: bool = False
    is_lost: bool = False
    """For good."""
    num_failed_starts: int = 0
    lost_at: deque[float] = field(default_factory=deque)


class Replacement:
    """The ranks of one server. Times are of any one clock that does not jump."""

    def __init__(self, num_engines: int) -> None:
        self._ranks = [_Rank() for _ in range(num_engines)]
        self._is_serving = False

    @property
    def num_up(self) -> int:
        return sum(rank.is_up for rank in self._ranks)

    @property
    def expected(self) -> list[int]:
        """Which ranks are on their way, after a loss."""
        if not self._is_serving:
            return []
        both = enumerate(self._ranks)
        return [index for index, rank in both if not rank.is_up and not rank.is_lost]

    def serve(self) -> None:
        """All ranks are up, and requests are served. Before that a loss is a start that failed."""
        self._is_serving = True
        for rank in self._ranks:
            rank.is_up = True

    def take_ready(self, index: int, epoch: int) -> bool:
        """A rank is up. Returns whether that is news."""
        rank = self._ranks[index]
        if not self._is_serving or rank.is_up or rank.is_lost or epoch != rank.epoch:
            return False
        rank.is_up = True
        rank.num_failed_starts = 0
        return True

    def take_loss(
        self,
        index: int,
        epoch: int,
        now: float,
        *,
        is_hopeless: bool = False,
        is_draining: bool = False,
    ) -> Verdict | None:
        """An incarnation of a rank is gone, or has been given up. None: that is known.

        Args:
            index, epoch: which one.
            now: when.
            is_hopeless: it has refused the settings or the model, as the next one would.
            is_draining: the server is ending.
        """
        rank = self._ranks[index]
        if epoch < rank.epoch or rank.is_lost:
            return None
        if not self._is_serving:
            rank.is_lost = True
            return GiveUp(None)
        rank.num_failed_starts += not rank.is_up
        rank.is_up = False
        if is_draining:
            rank.is_lost = True
            is_anybody_left = any(not each.is_lost for each in self._ranks)
            return GoOn() if is_anybody_left else GiveUp(None)
        if is_hopeless or rank.num_failed_starts >= MAX_FAILED_STARTS:
            rank.is_lost = True
            tries = f"it has failed to start {MAX_FAILED_STARTS} times in a row"
            return GiveUp(None if is_hopeless else tries)
        rank.epoch = epoch + 1
        return Restart(rank.epoch, self._delay_s(rank, now))

    def is_expected(self, index: int, epoch: int) -> bool:
        """Whether that incarnation has been started and is not up."""
        rank = self._ranks[index]
        return rank.epoch == epoch and not rank.is_up and not rank.is_lost

    def is_known(self, index: int, epoch: int) -> bool:
        """Whether the loss of that incarnation has been taken."""
        rank = self._ranks[index]
        return epoch < rank.epoch or rank.is_lost

    @staticmethod
    def _delay_s(rank: _Rank, now: float) -> float:
        while rank.lost_at and now - rank.lost_at[0] > CALM_S:
            rank.lost_at.popleft()
        num_before = len(rank.lost_at)
        rank.lost_at.append(now)
        if num_before == 0:
            return 0.0
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_before - 1, 30))
