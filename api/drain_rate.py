"""How fast work leaves, and so when those who are turned away should come back. Pure: amounts and
times in, seconds out.

    finished, prefilled --> DrainRate --> per second --> Line --> Retry-After

Used by `admission`. Times are of any one clock that does not jump.
"""

import math

MAX_RETRY_AFTER_S = 60
"""OpenAI's and Anthropic's clients heed nothing longer, and come back at once instead."""

UNKNOWN_RETRY_AFTER_S = 5
"""Where nothing has finished so far."""

_MEMORY_S = 20.0
"""What is older counts a third: long enough for slow answers, short enough for a load that has
changed."""


class DrainRate:
    """Amounts per second, over the time in which there was work: an idle hour says nothing about
    how fast a server is."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._busy_s = 0.0
        """Both with old ones counting less."""
        self._at = 0.0

    def begin(self, now: float) -> None:
        """There is work where there was none: the time until now does not count."""
        self._at = now

    def add(self, now: float, amount: float = 1.0) -> None:
        """So much has left."""
        self._amount, self._busy_s = self._aged(now)
        self._amount += amount
        self._at = now

    def per_s(self, now: float) -> float | None:
        """The rate; None where nothing has left so far."""
        amount, busy_s = self._aged(now)
        return amount / busy_s if amount and busy_s else None

    def _aged(self, now: float) -> tuple[float, float]:
        share = math.exp(-max(0.0, now - self._at) / _MEMORY_S)
        return self._amount * share, self._busy_s * share + _MEMORY_S * (1.0 - share)


class Line:
    """Those who were turned away, in the order in which they were: each is given a time when there
    should be room for him and for all before him. So they do not all come back at once."""

    def __init__(self) -> None:
        self._ends_at = 0.0
        """When there should be room for the last of them."""

    def join(self, now: float, amount: float, per_s: float | None) -> int:
        """The seconds after which somebody should come back who needs room for `amount`, where so
        much becomes free in a second: at least 1, at most `MAX_RETRY_AFTER_S`."""
        if per_s is None:
            return UNKNOWN_RETRY_AFTER_S
        return self._stand(now, self._left_s(now) + amount / per_s)

    def join_behind(self, now: float, excess: float, amount: float, per_s: float | None) -> int:
        """The same for somebody for whom there is room, however much he brings, as soon as `excess`
        is gone. He will bring about `amount`, which the next one has to wait for as well."""
        if per_s is None:
            return UNKNOWN_RETRY_AFTER_S
        return self._stand(now, max(self._left_s(now), excess / per_s), amount / per_s)

    def _left_s(self, now: float) -> float:
        return max(0.0, self._ends_at - now)

    def _stand(self, now: float, wait_s: float, more_s: float = 0.0) -> int:
        """Give somebody his time; the next one's is not before `more_s` later."""
        self._ends_at = now + min(wait_s + more_s, MAX_RETRY_AFTER_S)
        return max(1, math.ceil(min(wait_s, MAX_RETRY_AFTER_S)))
