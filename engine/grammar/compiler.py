"""Compiles structured outputs, and keeps what it has compiled, up to so many bytes.

Used by `station`, from its threads. Everything that takes long is here: the vocabulary, once, and
each grammar, first in a process that may die of it (`checker`), then here, on a thread with a large
stack. Nothing of it is loaded before the first request that needs it.
"""

import logging
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InvalidRequestError, RequestError
from engine.grammar.checker import Checker
from engine.grammar.matcher import Matcher
from engine.limits import MAX_COMPILED_BYTES, MAX_COMPILED_CACHE_BYTES
from engine.request import Request
from engine.structured_output import PARAM, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from engine.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


_BYTES_PER_S = 40 << 20
"""How fast a grammar grows while it finds states that it has not seen: measured, 37 MiB/s."""

_ENTRY_BYTES = 1024
"""Of an entry, beside what it holds."""

STACK_BYTES = 64 << 20
"""Of the threads that compile; address space, of which memory is used as far as it goes."""


class Grammar:
    """One compiled structured output, of which any number of matchers start. They share the states
    that the library finds on the way, so it grows while it is used, up to a limit of the library's.

    Args:
        ll: at the start; never advanced.
        num_bytes: that it takes before it grows.
    """

    def __init__(self, ll: "LLMatcher", vocabulary: "Vocabulary", num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_spent = False
        """It has found more states than it may have, and has no room for others."""
        self._ll = ll
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # the library refuses two threads in one object

    def start(self, request: Request) -> None:
        """Give `request` its matcher, with the output that it has already accepted.

        Raises:
            InvalidRequestError: that output does not fit, or is whole already.
        """
        with self._lock:
            ll = self._ll.deep_copy()
        matcher = Matcher(ll, self._vocabulary, request.sampling_params, self)
        for token_id in request.token_ids[request.num_prompt_tokens :]:
            if matcher.is_over or not matcher.accept(token_id):
                what = "is whole already" if matcher.is_over else "does not fit"
                raise InvalidRequestError(
                    f"output_token_ids: the structured output {what}", "output_token_ids"
                )
        if matcher.is_over:
            raise InvalidRequestError(
                "output_token_ids: the structured output is whole already", "output_token_ids"
            )
        request.matcher = matcher

    def note_growth(self, seconds: float) -> None:
        """It has looked for new states for so long."""
        # An estimate, from above: the library does not tell.
        self.num_bytes += int(seconds * _BYTES_PER_S)

    def note_spent(self) -> None:
        self.is_spent = True


class _Known:
    """An entry of the cache: a grammar, or why there is none."""

    def __init__(self, result: Grammar | RequestError, spec: str) -> None:
        self.result = result
        self._spec_bytes = len(spec) + _ENTRY_BYTES
        self.charged = self.num_bytes

    @property
    def num_bytes(self) -> int:
        own = self.result.num_bytes if isinstance(self.result, Grammar) else 0
        return self._spec_bytes + own


class Compiler:
    """Of one model. Thread-safe, but for its checkers: each thread has its own.

    Args:
        folder: of the model.
        vocab_size: the model's.
        max_cache_bytes: of grammars, and of errors, that are kept.
    """

    def __init__(
        self, folder: Path, vocab_size: int, max_cache_bytes: int = MAX_COMPILED_CACHE_BYTES
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._max_cache_bytes = max_cache_bytes
        self._vocabulary: Vocabulary | RequestError | None = None
        self._vocabulary_lock = threading.Lock()
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutput, _Known] = OrderedDict()
        """Least recently used first."""
        self.num_cached_bytes = 0

    def known(self, output: StructuredOutput) -> Grammar | None:
        """Return what has been compiled already. Takes no time.

        Raises:
            RequestError: compiling it has failed.
        """
        with self._lock:
            known = self._known.get(output)
            if known is None:
                return None
            self._known.move_to_end(output)
            self.num_cached_bytes += known.num_bytes - known.charged  # it has grown
            known.charged = known.num_bytes
            if isinstance(known.result, Grammar) and known.result.is_spent:
                self._forget(output)
                return None
        if isinstance(known.result, RequestError):
            raise _again(known.result)
        return known.result

    def compile(self, output: StructuredOutput, checker: Checker) -> Grammar:
        """Return the grammar of `output`, compiled unless it is known.

        Raises:
            RequestError: it cannot be compiled.
            RequestFailedError: not now.
        """
        if (grammar := self.known(output)) is not None:
            return grammar
        try:
            num_bytes = checker.check(output)
            result: Grammar | RequestError = self._compile(output, num_bytes)
        except RequestError as error:
            result = error
        self._keep(output, result)
        if isinstance(result, RequestError):
            raise result
        return result

    def _compile(self, output: StructuredOutput, num_bytes: int) -> Grammar:
        from llguidance import LLMatcher  # 30 ms, and nothing that most servers need

        from engine.grammar import source, words

        if num_bytes > MAX_COMPILED_BYTES:
            raise InvalidRequestError(
                f"{output.kind}: compiled it takes {num_bytes >> 20} MiB, and at most"
                f" {MAX_COMPILED_BYTES >> 20} are possible",
                PARAM,
            )
        vocabulary = self._load_vocabulary()
        began = time.monotonic()
        ll = LLMatcher(
            vocabulary.ll, source.grammar_of(output), log_level=0, limits=source.limits()
        )
        if not ll.is_error():
            ll.compute_bitmask()  # the first is often the slowest, and nobody waits for it here
        if ll.is_error():
            raise InvalidRequestError(
                f"{output.kind}: {words.reason(output, ll.get_error())}", PARAM
            )
        logger.debug("compiled a %s compile_s=%.3f", output.kind, time.monotonic() - began)
        return Grammar(ll, vocabulary, num_bytes)

    def _load_vocabulary(self) -> "Vocabulary":
        with self._vocabulary_lock:
            if self._vocabulary is None:
                from engine.grammar import vocabulary

                try:
                    self._vocabulary = vocabulary.load(self._folder, self._vocab_size)
                except RequestError as error:
                    self._vocabulary = error
            if isinstance(self._vocabulary, RequestError):
                raise _again(self._vocabulary)
            return self._vocabulary

    def _keep(self, output: StructuredOutput, result: Grammar | RequestError) -> None:
        with self._lock:
            if output in self._known:
                self._forget(output)
            known = self._known[output] = _Known(result, output.spec)
            self.num_cached_bytes += known.charged
            while len(self._known) > 1 and self.num_cached_bytes > self._max_cache_bytes:
                self._forget(next(iter(self._known)))

    def _forget(self, output: StructuredOutput) -> None:
        self.num_cached_bytes -= self._known.pop(output).charged


def _again(error: RequestError) -> RequestError:
    """The same error as a new object: one that is raised twice keeps the first traceback."""
    return type(error)(error.message, error.param)
