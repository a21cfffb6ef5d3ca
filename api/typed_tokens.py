"""Special tokens that somebody has typed, which are text like any other: `<|im_end|>` in a message
must not end it. Pure; `chat_template` marks them where a text comes from a request, `tokenizer`
encodes what is marked.

    message     Say <|im_end|>            what was typed
    rendered    …user\\nSay <·|im_end|><|im_end|>\\n…     · is the mark; the template's own has none
    tokens      … Say < | im _ end | > <|im_end|> …      the library finds the unmarked one only

The mark goes behind the first character of each special token in a text, and of each beginning of
one at the text's end, which another text might complete. Templates go on as before: they trim
white space, and look for words that are not special. The library takes special tokens out before it
normalizes, and the mark goes when it normalizes: so all but the special tokens is as without it.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from api.reasoning import FAMILIES

MARK = "\ufdd0\ufdd1\ufdd0"
"""Of characters that Unicode sets aside for a program's own use: no text has them. One that has
them all the same loses them."""

_MARKUP = re.compile(r"[<\[]\S+[>\]]")
"""Not line breaks or words, which vocabularies add as well."""


def _alternatives(tokens: Iterable[str]) -> str:
    """A pattern of all tokens, with what they have in common written once: a vocabulary may have
    thousands. Where one begins another, the shorter will do."""
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        if not token:
            return ""
        by_first.setdefault(token[0], []).append(token[1:])
    branches = [re.escape(char) + _alternatives(rest) for char, rest in by_first.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class TypedTokens:
    """Marks some tokens of a vocabulary in texts.

    Args:
        tokens: their texts. One of a single character cannot be marked, and is left out.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(token for token in tokens if len(token) > 1)
        self._tokens = sorted(self.tokens)
        self._longest = max(map(len, self._tokens), default=0)
        first_chars = "".join({token[0] for token in self._tokens})
        self._first_char = re.compile(f"[{re.escape(first_chars)}]" if first_chars else r"(?!)")
        self._starts = re.compile(f"(?={_alternatives(self._tokens)})")
        """Looks ahead, since tokens may overlap."""

    def mark(self, text: str) -> str:
        """The text with its tokens marked."""
        if self._first_char.search(text) is None:  # as in most
            return text
        starts = {match.start() for match in self._starts.finditer(text)}
        starts.update(self._starts_at_end(text))
        if not starts:
            return text
        cuts = [0, *(start + 1 for start in sorted(starts)), len(text)]
        return MARK.join(text[begin:end] for begin, end in pairwise(cuts))

    def _starts_at_end(self, text: str) -> Iterator[int]:
        """Where an end of the text begins that is the beginning of a token."""
        for match in self._first_char.finditer(text, max(0, len(text) - self._longest + 1)):
            end = text[match.start() :]
            following = bisect_left(self._tokens, end)
            if following < len(self._tokens) and self._tokens[following].startswith(end):
                yield match.start()


class ChatMarks:
    """What is marked in a chat, by whose words they are.

    In all messages, special tokens and whatever else the template parts turns by: vocabularies do
    not call all of that special (DeepSeek's `<｜User｜>`). Not so the markers of thoughts in
    messages of the assistant, where templates look for them, and in those of the developer, who may
    tell the model to use them. In all others also the rest of the template's markup, like Qwen's
    `<tool_response>`.

    Args:
        special: texts of the special tokens.
        added: texts of all added tokens.
        turns: a conversation, rendered.
        sources: of the chat templates.
    """

    def __init__(
        self,
        special: Collection[str],
        added: Collection[str],
        turns: str = "",
        sources: Collection[str] = (),
    ) -> None:
        markup = {token for token in added if _MARKUP.fullmatch(token)}
        parting = {*special, *(token for token in markup if token in turns)}
        written = {token for token in markup if any(token in source for source in sources)}
        markers = [marker for each in FAMILIES.values() for marker in (each.start, each.end)]
        of_thoughts = {t for t in parting if any(marker.startswith(t) for marker in markers)}
        self.of_developer = TypedTokens(parting - of_thoughts).mark
        """Also for definitions of tools, and variables of the template."""

        self.of_others = TypedTokens(parting | written).mark
        """Also for documents."""

    def of(self, role: str) -> Callable[[str], str]:
        """Marks a text in a message of this role."""
        is_trusted = role in ("assistant", "developer", "system")
        return self.of_developer if is_trusted else self.of_others


NO_MARKS = ChatMarks((), ())
"""Marks nothing."""


def unmarked(text: str) -> str:
    """The text as it was typed, for people."""
    return text.replace(MARK, "")


def _found_as_written(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """A token as the library should look for it. Some are looked for in what is normalized, where
    the marks are gone."""
    if not (token.special or _MARKUP.fullmatch(token.content)):
        return token
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def splitting(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer for texts with marks. It shares the vocabulary, and takes milliseconds."""
    twin = tokenizers.Tokenizer(backend.model)
    added = sorted(backend.get_added_tokens_decoder().items())
    twin.add_tokens([_found_as_written(token) for _, token in added])
    if backend.post_processor is not None:
        twin.post_processor = backend.post_processor
    if isinstance(backend.model, tokenizers.models.BPE):
        drop = normalizers.Replace(MARK, "")
        normalizer = backend.normalizer
        twin.normalizer = normalizers.Sequence([drop, normalizer]) if normalizer else drop
        if backend.pre_tokenizer is not None:
            twin.pre_tokenizer = backend.pre_tokenizer
        return twin
    # Other models may find a special token in their own vocabulary: they get it in two pieces.
    cut = pre_tokenizers.Split(MARK, "removed")
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    first = backend.pre_tokenizer
    twin.pre_tokenizer = pre_tokenizers.Sequence([first, cut]) if first else cut
    return twin
