"""What each token of a model adds to the text, as llguidance wants to know it.

Read from tokenizer.json, at the first request that needs it: on 262,144 tokens that takes two
seconds and 120 MiB. Merges and scores are left aside: whoever follows a grammar token by token need
not be able to tokenize. Used by `compiler`.
"""

import logging
import time
from pathlib import Path
from typing import Any

import llguidance
import msgspec

from engine.errors import UnsupportedFieldError
from engine.structured_output import PARAM
from engine.token_bytes import piece_rule

logger = logging.getLogger(__name__)


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """tokenizer.json, as far as it matters here."""

    model: _Model
    decoder: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


class Vocabulary:
    """The tokens of a model.

    Args:
        tokens: the bytes of each token, by id; empty for ids that are none.
        special_token_ids: those that are no text.
        vocab_size: the model's: tokens from there on cannot be sampled.
    """

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        """Of a mask of the model's tokens."""
        self.ll = llguidance.LLTokenizer(_Tokens(tokens, special_token_ids, vocab_size))
        self.num_ll_words = -(-self.ll.vocab_size // 32)
        """Of a mask of the library's."""


def load(folder: Path, vocab_size: int) -> Vocabulary:
    """Read the vocabulary of a model folder.

    Raises:
        UnsupportedFieldError: there is none whose tokens are pieces of text.
    """
    began = time.monotonic()
    try:
        file = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
        rule = piece_rule(file.decoder)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        logger.warning("no structured output: tokenizer.json cannot be read: %s", error)
        raise _unsupported() from error
    if rule is None:
        logger.warning("no structured output: the tokenizer's tokens are no pieces of text")
        raise _unsupported()
    names = _names(file.model.vocab)
    added = {token.id: token for token in file.added_tokens}
    tokens = [b""] * (max([-1, *names, *added]) + 1)
    for token_id, name in names.items():
        tokens[token_id] = rule.token_bytes(name)
    for token in file.added_tokens:
        tokens[token.id] = token.content.encode()
    special = [token.id for token in file.added_tokens if token.special]
    vocabulary = Vocabulary(tokens, special, vocab_size)
    logger.info(
        "vocabulary for structured output loaded tokens=%d load_s=%.1f",
        *(len(tokens), time.monotonic() - began),
    )
    return vocabulary


def _names(vocab: dict[str, int] | list[tuple[str, float]]) -> dict[int, str]:
    if isinstance(vocab, list):
        return {token_id: name for token_id, (name, _) in enumerate(vocab)}
    return {token_id: name for name, token_id in vocab.items()}


def _unsupported() -> UnsupportedFieldError:
    return UnsupportedFieldError(
        "structured output is not possible with this model's tokenizer", PARAM
    )


class _Tokens(llguidance.TokenizerWrapper):
    """The attributes that the library reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], vocab_size: int) -> None:
        self.is_tokenizer_wrapper = True
        # An end of its own, beyond all tokens of the model, so that it is cut off its masks: how a
        # request may end is in its sampling parameters (`matcher`).
        self.eos_token_id = max(len(tokens), vocab_size)
        self.tokens = [*tokens, *[b""] * (self.eos_token_id - len(tokens)), b"<end>"]
        self.special_token_ids = [*special_token_ids, self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("grammars force no tokens (`source`), so nothing is tokenized")
