"""Token ids to text, as they arrive. One detokenizer for each sequence; used by `output_processor`.

What comes out, joined, is the whole text of prompt and output without the text of the prompt: so a
completion goes on where its prompt ended, and a space that is only cut at the start of a text is
kept. No piece ends inside a character: an incomplete tail waits for its other bytes, and if they
never come it is U+FFFD, once. Nothing else waits.
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from api.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_CONTEXT_TOKENS = 6
"""Earlier tokens that decide how the next one reads, where tokens depend on their neighbours."""

_MAX_WAITING_TOKENS = 8
"""Tokens that end in no whole character: after so many the vocabulary has a token that is U+FFFD
itself."""


class Detokenizer(Protocol):
    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that they complete."""

    def finish(self) -> str:
        """Return what is left of an incomplete character."""


def start(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    kept_token_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """A detokenizer for what follows a prompt. `kept_token_ids` are special tokens that are not
    skipped."""
    skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
    if kept_token_ids:
        skipped -= kept_token_ids
    if tokenizer.rule is not None:
        return _ByteDetokenizer(tokenizer, prompt_token_ids, skipped)
    return _WindowDetokenizer(tokenizer, prompt_token_ids, skipped, spaces_between_special_tokens)


class _ByteDetokenizer:
    """For vocabularies whose tokens are bytes, one after the other."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._first_token_bytes = tokenizer.first_token_bytes
        self._skipped = skipped
        self._rest = b""
        """Of a character that is not complete."""
        self._is_at_start = not any(self._contributing(prompt_token_ids))
        self._decode(self._tail(prompt_token_ids))

    def push(self, token_ids: Iterable[int]) -> str:
        if self._is_at_start:
            return self._push_at_start(list(token_ids))
        skipped, token_bytes = self._skipped, self._token_bytes
        pieces = [token_bytes(i) for i in token_ids if i not in skipped]
        return self._decode(b"".join(pieces))

    def finish(self) -> str:
        return self._decode(b"", is_last=True)

    def _push_at_start(self, token_ids: list[int]) -> str:
        for place, token_id in enumerate(token_ids):
            if any(self._contributing([token_id])):
                self._is_at_start = False
                first = self._decode(self._first_token_bytes(token_id))
                return first + self.push(token_ids[place + 1 :])
        return ""

    def _decode(self, data: bytes, is_last: bool = False) -> str:
        if self._rest:
            data = self._rest + data
        text, num_used = utf_8_decode(data, "replace", is_last)
        self._rest = data[num_used:]
        return text

    def _contributing(self, token_ids: Iterable[int]) -> Iterable[bytes]:
        """The bytes of the tokens that show."""
        return (self._token_bytes(i) for i in token_ids if i not in self._skipped)

    def _tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt: the output may complete a character that begins there."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                tail = self._token_bytes(token_id) + tail
            if len(tail) >= 3:  # an incomplete character has at most three
                break
        return tail


class _WindowDetokenizer:
    """For the others: decodes the last few tokens again and again, and takes what is new."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int],
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._joined = frozenset() if spaces_between_special_tokens else tokenizer.added_token_ids
        latest = islice(filter(self._shows, reversed(prompt_token_ids)), _CONTEXT_TOKENS)
        self._window = list(latest)[::-1]
        self._num_waiting = 0
        self._known = self._decode()

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self._push(i) for i in token_ids if self._shows(i))

    def finish(self) -> str:
        return self._take(self._decode()) if self._num_waiting else ""

    def _shows(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.token_name(token_id) is not None

    def _push(self, token_id: int) -> str:
        follows_special = bool(self._window) and self._window[-1] in self._joined
        self._window.append(token_id)
        self._num_waiting += 1
        text = self._decode()
        if text.endswith(REPLACEMENT) and self._num_waiting < _MAX_WAITING_TOKENS:
            return ""
        new = self._take(text)
        return new.removeprefix(" ") if follows_special and token_id in self._joined else new

    def _take(self, text: str) -> str:
        """Return what `text`, the window's, has more than was known, and move the window on."""
        new = text[len(self._known) :]
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._num_waiting = 0
        self._known = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
