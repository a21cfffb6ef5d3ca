"""What each token adds to the text, in bytes.

For byte-level BPE and SentencePiece-like vocabularies (nearly every causal language model) a text
is the bytes of its tokens one after the other, whatever stands around them, but for the very start
of the text. `piece_rule` recognises such vocabularies by the `decoder` of tokenizer.json. Used by
`api.tokenizer` and `api.detokenizer`, which need nothing else to turn tokens into text piece by
piece, exactly and in linear time, and by `engine.grammar`, which must know what a token would add.
Where tokens depend on their neighbours (WordPiece, CTC, word suffixes) there is no rule: the
`tokenizers` library decodes, and there is no structured output.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x(\+?[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")
"""A byte of SentencePiece's byte fallback, as the library reads it: six characters in all."""


class PieceRule(Protocol):
    """How a token's name in the vocabulary becomes bytes of text."""

    def token_bytes(self, token: str) -> bytes:
        """The token anywhere but at the start of a text."""

    def first_token_bytes(self, token: str) -> bytes:
        """The token as the first of a text: encoding may have put a space there."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in
    order. Source: Radford et al. 2019, GPT-2's byte-level BPE.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_LEVEL = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class ByteLevelRule:
    """Each character of a token stands for one byte (GPT-2, Llama 3, Qwen)."""

    def token_bytes(self, token: str) -> bytes:
        try:
            return bytes([_BYTE_LEVEL[char] for char in token])
        except KeyError:  # an added token, written as plain text
            return token.encode()

    def first_token_bytes(self, token: str) -> bytes:
        return self.token_bytes(token)


@dataclass(frozen=True, slots=True)
class SentencePieceRule:
    """A mark stands for the space, unknown characters are spelled in byte tokens (Llama 2, Mistral,
    Gemma)."""

    replacements: tuple[tuple[str, str], ...]
    has_byte_fallback: bool
    is_space_cut_at_start: bool

    def token_bytes(self, token: str) -> bytes:
        for mark, content in self.replacements:
            token = token.replace(mark, content)
        if self.has_byte_fallback and len(token) == 6 and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    def first_token_bytes(self, token: str) -> bytes:
        text = self.token_bytes(token)
        return text.removeprefix(b" ") if self.is_space_cut_at_start else text


@dataclass(frozen=True, slots=True)
class MetaspaceRule:
    """A mark stands for the space, and for nothing in the first token (Unigram models)."""

    mark: str
    is_cut_at_start: bool

    def token_bytes(self, token: str) -> bytes:
        return token.replace(self.mark, " ").encode()

    def first_token_bytes(self, token: str) -> bytes:
        return token.replace(self.mark, "" if self.is_cut_at_start else " ").encode()


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule | None:
    """The rule of a tokenizer.json's `decoder`; None where tokens depend on their neighbours."""
    steps = _flatten(decoder)
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return ByteLevelRule()
        case ["Metaspace"]:
            scheme = steps[0].get("prepend_scheme", "always")
            is_cut = steps[0].get("add_prefix_space", True) and scheme != "never"
            return MetaspaceRule(steps[0].get("replacement", "▁"), is_cut)
        case _:
            return _sentencepiece_rule(steps)


def _flatten(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """The steps of a decoder that is one step, or a sequence of steps, or of sequences."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _sentencepiece_rule(steps: Sequence[Mapping[str, Any]]) -> SentencePieceRule | None:
    """The rule of Replace…, ByteFallback?, Fuse?, Strip?: in that order, and with no other step."""
    rest = list(steps)
    replacements = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    has_byte_fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    rest = rest[has_byte_fallback:]
    # Without Fuse, Strip would cut each token.
    is_cut = rest[-2:] == [
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    rest = rest[:-1] if is_cut else rest
    if not replacements or rest not in ([], [{"type": "Fuse"}]):
        return None
    return SentencePieceRule(tuple(replacements), has_byte_fallback, is_cut)
