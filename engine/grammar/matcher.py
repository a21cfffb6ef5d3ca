"""How far the output of one request is in its language, and what may come next.

Lives with its request in the engine core, whatever happens to that: what has been accepted stays
accepted when a request is preempted, and tokens that were generated elsewhere are accepted first.
Made by `compiler`; filled and fed by the core's main thread.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.limits import MAX_MASK_S
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engine.grammar.vocabulary import Vocabulary

Words = NDArray[np.uint32]


NO_GROWTH_S = 0.001
"""A mask of states that have been seen before takes less."""


class Growth(Protocol):
    """What a matcher tells its grammar, which all its matchers share."""

    def note_growth(self, seconds: float) -> None: ...
    def note_spent(self) -> None: ...


class Matcher:
    """Follows one output.

    Args:
        ll: of the library, at the start of its grammar.
        vocabulary: the model's.
        params: of the request: its own ends are possible where the grammar's is.
        grammar: that it follows.
    """

    def __init__(
        self,
        ll: "LLMatcher",
        vocabulary: "Vocabulary",
        params: SamplingParams,
        grammar: Growth,
    ) -> None:
        self._ll = ll
        self._grammar = grammar
        self._ends = _below(params.ending_token_ids, vocabulary.vocab_size)
        self._all_ends = _below(
            (*params.eos_token_ids, *params.stop_token_ids), vocabulary.vocab_size
        )
        self._words = np.zeros(vocabulary.num_ll_words, np.uint32)
        self._num_words = vocabulary.num_words
        spare = vocabulary.num_words * 32 - vocabulary.vocab_size
        self._last_word = np.uint32(0xFFFF_FFFF >> spare)
        self.is_over = False
        """The output is whole: nothing can follow, or its end was sampled."""
        self.fault: str | None = None
        """Why no more tokens can be accepted, as the client may know it."""

    def accept(self, token_id: int) -> bool:
        """Take in the next token of the output. False, with `fault` set, if it cannot be that."""
        if self.fault is not None:
            return False
        if self._ll.try_consume_tokens([token_id]):
            self.is_over = self._ll.is_stopped() and not self._ll.is_error()
            return True
        if token_id in self._all_ends and self._ll.is_accepting():
            self.is_over = True
            return True
        self._fail(f"token {token_id} does not fit the structured output")
        return False

    def fill(self, words: Words) -> bool:
        """Write which tokens may come next into `[num_words]`. False where nothing can be said:
        `fault` is set, and the next token will not be accepted."""
        if self.fault is not None:
            return False
        began = time.thread_time()  # what others do meanwhile is not its fault
        self._ll.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        took_s = time.thread_time() - began
        if took_s > NO_GROWTH_S:
            self._grammar.note_growth(took_s)
        if self._ll.is_error() or took_s > MAX_MASK_S:
            self._fail("the structured output takes too long")
            return False
        self._cut_into(words)
        if self._ll.is_accepting():
            _allow(words, self._ends if self._ends or words.any() else self._all_ends)
        if not words.any():
            self.fault = "no token of this model goes on with the structured output"
            return False
        return True

    def _fail(self, fault: str) -> None:
        """Nothing more can be accepted: for the library's reason, if it has one, or for `fault`."""
        if self._ll.is_error():
            fault = "the structured output has become too complex"
            self._grammar.note_spent()
        self.fault = fault

    def _cut_into(self, words: Words) -> None:
        """Copy the mask, without tokens that the model does not have."""
        common = min(len(words), len(self._words))
        words[:common] = self._words[:common]
        words[common:] = 0
        words[self._num_words - 1] &= self._last_word


def _below(token_ids: Iterable[int], vocab_size: int) -> frozenset[int]:
    """Those that the model has."""
    return frozenset(token_id for token_id in token_ids if token_id < vocab_size)


def _allow(words: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
