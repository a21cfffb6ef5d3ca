"""What a grammar allows, by the library that will enforce it and a small real tokenizer."""

import random
from collections.abc import Sequence
from functools import cache

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from engine.structured_output import StructuredOutput
from tests.helpers.tiny_tokenizers import byte_level

_FREE = 100
"""Where more tokens than that may come, a text may go on."""

_CLOSERS = ('"', "}", "]", ")", ",", "'", "<", "\n", ":")


@cache
def tokenizer_with(special: tuple[str, ...] = (), plain: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level tokenizer with some markers as tokens, special ones or ordinary ones."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    return tokenizer


def marker_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens that stand apart from the vocabulary, as `api.markup` finds them."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if len(token.content) > 2}


def compiled(output: StructuredOutput) -> str:
    match output.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(output.spec)
        case "regex":
            return LLMatcher.grammar_from_regex(output.spec)
        case "choice":
            return llguidance.grammar_from("choice", output.spec)
        case "lark":
            return LLMatcher.grammar_from_lark(output.spec)


class Language:
    """The texts that a description allows."""

    def __init__(
        self,
        output: StructuredOutput,
        tokenizer: Tokenizer | None = None,
        endings: Sequence[str] = (),
    ) -> None:
        """`endings`: what ends long texts; a walk would hardly come upon it."""
        self._tokenizer = tokenizer or tokenizer_with()
        self._endings = [self._ids(ending) for ending in endings]
        self._grammar = compiled(output)
        error = LLMatcher.validate_grammar(self._grammar)
        assert not error, f"{error}\n{output.spec}"

    def has(self, text: str) -> bool:
        """Whether the whole text may be written, as its tokenizer would cut it."""
        matcher = self._matcher()
        ids = self._ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def may_begin(self, text: str) -> bool:
        """Whether a text may begin so."""
        ids = self._ids(text)
        return self._matcher().try_consume_tokens(ids) == len(ids)

    def any_text(self, seed: int, max_tokens: int = 2000) -> str:
        """A text, token by token at random, with a liking for what ends strings and lists. A walk
        into values in values without end is given up for another."""
        choose = random.Random(seed)
        while (text := self._walk(choose, max_tokens)) is None:
            pass
        return text

    def _walk(self, choose: random.Random, max_tokens: int) -> str | None:
        matcher = self._matcher()
        mask = llguidance.numpy.allocate_token_bitmask(1, _ll(self._tokenizer).vocab_size)
        ids: list[int] = []
        while not matcher.is_stopped():
            if len(ids) >= max_tokens:
                return None
            llguidance.numpy.fill_next_token_bitmask(matcher, mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
            tokens = self._pick(choose, matcher, allowed)
            assert tokens, f"nothing may follow {self.text(ids)!r}"
            if tokens[0] == self._eos:
                break
            assert matcher.consume_tokens(tokens), matcher.get_error()
            ids += tokens
        return self.text(ids)

    def text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _pick(
        self, choose: random.Random, matcher: LLMatcher, allowed: npt.NDArray[np.bool_]
    ) -> list[int]:
        if allowed[self._eos] and choose.random() < 0.5:
            return [self._eos]
        if self._endings and allowed.sum() > _FREE and choose.random() < 0.2:
            ending = choose.choice(self._endings)
            if matcher.validate_tokens(ending) == len(ending):
                return ending
        closing = np.flatnonzero(allowed & _closers(self._tokenizer)[: len(allowed)])
        is_closing = len(closing) and choose.random() < 0.4
        among = closing if is_closing else np.flatnonzero(allowed)
        return [int(choose.choice(among))] if len(among) else []

    @property
    def _eos(self) -> int:
        return _ll(self._tokenizer).eos_token

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _matcher(self) -> LLMatcher:
        matcher = LLMatcher(_ll(self._tokenizer), self._grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher


@cache
def _closers(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Tokens that may end something; masks are a little longer than the vocabulary."""
    texts = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    return np.array([text.startswith(_CLOSERS) for text in texts] + [False] * 32)


@cache
def _ll(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>"))
