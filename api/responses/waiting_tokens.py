"""Which tokens a piece of text came from, where an answer holds more than texts. Pure.

Markers of thoughts and calls are tokens whose text is nobody's, and what may become a marker is
held back; so texts lag behind tokens, and skip some.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from api import logprobs
from api.answer_bodies import TokenLogprob
from api.output_processor import OutputDelta


@dataclass(frozen=True, slots=True)
class _Token:
    num_bytes: int
    logprob: TokenLogprob | None


class WaitingTokens:
    """Tokens whose text has not been placed yet.

    Args:
        num_bytes: how many bytes a token adds to the text, by its id.
    """

    def __init__(self, num_bytes: Callable[[int], int]) -> None:
        self._num_bytes = num_bytes
        self._tokens: deque[_Token] = deque()
        self._text = ""
        """What came of them; less where stop strings or half characters hold it back."""
        self._num_ahead = 0
        """Bytes of the first tokens that were taken already, with a token before them."""

    def push(self, delta: OutputDelta) -> None:
        """More tokens, and more text, which may be that of earlier ones."""
        found = logprobs.for_chat(delta.logprobs or ()).content
        for token_id, logprob in zip_longest(delta.token_ids, found):
            self._tokens.append(_Token(self._num_bytes(token_id), logprob))
        self._text += delta.text

    def take(self, piece: str) -> "Taken":
        """Those of a piece of the text. What came before it is dropped.

        What nobody has written as it stands (arguments that were mended) takes all that there is.
        """
        place = self._text.rfind(piece)
        if place < 0:
            place, piece = 0, self._text
        start = len(self._text[:place].encode())
        end = start + len(piece.encode())
        self._text = self._text[place + len(piece) :]
        passed, taken = self._num_ahead, []
        while self._tokens and passed < end:
            token = self._tokens.popleft()
            passed += token.num_bytes
            if passed > start:
                taken.append(token)
        self._num_ahead = max(0, passed - end)
        return Taken(len(taken), [t.logprob for t in taken if t.logprob is not None])


@dataclass(frozen=True, slots=True)
class Taken:
    """The tokens of a piece of text."""

    count: int
    logprobs: Sequence[TokenLogprob]
    """If they were asked for."""
