"""The one deadline of a start: it runs from the moment when all ranks have their places."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadline:
    """So many seconds, from now on. Handed to all who wait for a part of the same thing."""

    timeout_s: float
    began_s: float = field(default_factory=time.monotonic)
    """On the monotonic clock, which all processes of this machine share."""

    @property
    def left_s(self) -> float:
        """Never negative."""
        return max(0.0, self.began_s + self.timeout_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0
