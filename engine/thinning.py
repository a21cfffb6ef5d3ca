"""Counts of what peers do wrong, whose log lines get rarer the more there is.

Whoever sends rubbish, or keeps knocking, must not fill the disk.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ThinnedCount:
    """One such count. `add` is for one thread, reading for any."""

    count: int = 0

    def add(self) -> bool:
        """Count one more. Returns whether it is to be logged: number 1, 2, 4, 8, … is."""
        self.count += 1
        return self.count & (self.count - 1) == 0
