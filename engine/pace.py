"""When to plan the next step: as late as the workers allow.

    step n      |-- runs, as long as the last one of its size did --|
    step n + 1                        planned here ^  |---- runs ----

A plan is made before it is needed, so that the workers need not wait for it. But what comes after
it was made waits for the step after that, so it is not made earlier than need be. If step n ends
sooner than expected, nothing is lost but the overlap. Used by `core`; pure, times are the caller's.
"""

MARGIN = 0.1
"""Of a step's expected time: steps of one size differ by less on a quiet machine."""

LEAD_S = 0.005
"""And that much on top: planning for hundreds of requests takes a millisecond or two, more where
the workers use all cores. Steps that are shorter are planned ahead at once."""


class Pace:
    """How long steps take, by their size, and how far the one is that runs."""

    def __init__(self) -> None:
        self._durations: dict[int, float] = {}
        """Of the last step of each size, which is the number of bits of its number of tokens."""
        self._size = 0
        self._began = 0.0

    def begin(self, num_tokens: int, now: float) -> None:
        """The workers begin a step."""
        self._size = num_tokens.bit_length()
        self._began = now

    def end(self, now: float) -> None:
        """They have ended it."""
        self._durations[self._size] = now - self._began

    def seconds_left(self, now: float) -> float:
        """How long it is until the next step should be planned; 0 or less if it is time."""
        expected = self._durations.get(self._size, 0.0)
        return self._began + expected * (1 - MARGIN) - LEAD_S - now
