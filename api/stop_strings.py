"""Stop strings in a text that arrives in pieces. Pure; used by `output_processor`.

The text ends where a stop string is first complete; of several that end there, the longest counts.
That is the same however the text is cut into pieces. A stop string, or a part of one, never leaves
before it is known not to be one; and nothing is held but the longest end of the text that may still
become one.

An automaton reads each character once. Its state is the longest prefix of any stop string that the
text ends with, and that prefix is what is held:

    stop strings "END" and "\\n\\nUser"

    text so far     "…text"   "…text\\n"   "…text\\n\\n"   "…text\\n\\nE"   "…text\\n\\nEx"
    state: held     ""        "\\n"        "\\n\\n"        "E"             ""

Source: Aho and Corasick 1975, "Efficient string matching: an aid to bibliographic search".
"""

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """The states of one set of stop strings. Immutable once built, shared by sequences."""

    __slots__ = ("_first_char", "_next", "_otherwise", "holds", "matches")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._otherwise: list[int] = [0]
        """State of the longest shorter end of the text that is a prefix too."""
        depths = [0]
        self.matches: list[str | None] = [None]
        """The longest stop string that the text ends with in this state."""
        for string in stop_strings:
            state = self._add_prefixes(string, depths)
            self.matches[state] = string
        self.holds = self._link(depths)
        """Characters to hold in each state: what may still grow into a stop string."""
        first_chars = "".join(self._next[0])
        self._first_char = re.compile(f"[{re.escape(first_chars)}]")

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._otherwise[state]

    def skip(self, text: str, start: int) -> int:
        """The first place, from `start` on, where a stop string may begin."""
        match = self._first_char.search(text, start)
        return len(text) if match is None else match.start()

    def _add_prefixes(self, string: str, depths: list[int]) -> int:
        state = 0
        for depth, char in enumerate(string, start=1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._otherwise.append(0)
                self.matches.append(None)
                depths.append(depth)
            state = self._next[state][char]
        return state

    def _link(self, depths: list[int]) -> list[int]:
        """Fill in `_otherwise` and the shorter matches, shallow states first; return the holds."""
        holds = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            shorter = self._otherwise[state]
            if self.matches[state] is None:
                self.matches[state] = self.matches[shorter]
            holds[state] = depths[state] if self._next[state] else holds[shorter]
            for char, following in self._next[state].items():
                self._otherwise[following] = self.step(shorter, char)
                queue.append(following)
        return holds


@lru_cache(maxsize=16)
def automaton(stop_strings: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings. Most requests of a server bring the same ones."""
    return StopAutomaton(stop_strings)


class StopMatcher:
    """Watches the text of one sequence."""

    __slots__ = ("_automaton", "_held", "_includes_match", "_state", "matched")

    def __init__(self, stop_strings: tuple[str, ...], *, include_match: bool = False) -> None:
        self._automaton = automaton(stop_strings)
        self._includes_match = include_match
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add text and return what may leave.

        Args:
            may_match: False lets stop strings pass that are complete within `text`; one that only
                begins there still counts later.
        """
        assert self.matched is None, "the text has ended"
        automaton, state = self._automaton, self._state
        place = 0
        while place < len(text):
            if state == 0:
                place = automaton.skip(text, place)
                if place == len(text):
                    break
            state = automaton.step(state, text[place])
            place += 1
            if may_match and (match := automaton.matches[state]) is not None:
                return self._end(match, self._held + text[:place])
        self._state = state
        text = self._held + text
        num_free = len(text) - automaton.holds[state]
        self._held = text[num_free:]
        return text[:num_free]

    def finish(self) -> str:
        """Return what was held: the text is over and it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _end(self, match: str, text: str) -> str:
        self.matched = match
        self._held = ""
        return text if self._includes_match else text[: len(text) - len(match)]
