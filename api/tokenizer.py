"""Text to token ids, and what each token id stands for.

Built on the `tokenizers` library alone: no torch, no transformers, ready in about a second and a
third of the memory. Equal to transformers' AutoTokenizer for folders with a tokenizer.json, which
is the truth here; one without has been given one before (`cluster.tokenizer_source`).
Used by the processors of this package; `detokenizer` turns ids into text as they arrive,
`chat_template` messages into text.

A special token written out in a text (`</s>`) is encoded as that token, as AutoTokenizer does by
default; where it is marked (`typed_tokens`), as text. Messages of a chat are, prompts are not.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from api import typed_tokens
from api.typed_tokens import TypedTokens
from engine.errors import ConfigError, InvalidRequestError
from engine.token_bytes import PieceRule, piece_rule

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads; encoding releases the GIL."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        *,
        model_eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Use `load`. `config` is tokenizer_config.json."""
        self.special_tokens = {
            name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name)))
        }
        """Named special tokens, as chat templates see them: `bos_token`, `eos_token`, …"""

        self.chat_templates = dict(chat_templates or {})
        """By name; "default" is the usual one."""

        _prepare(backend, config, self.special_tokens)
        self._backend = backend
        self._rule = _rule_of(backend)
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        """Tokens that are matched before the vocabulary: special ones, and others."""

        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_token_texts = frozenset(token.content for token in added.values())
        self.special_token_texts = frozenset(t.content for t in added.values() if t.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens that have a name. The model's embedding may have more rows."""

        own_eos = self.token_id(self.eos_token) if self.eos_token else None
        self.eos_token_ids = tuple(
            dict.fromkeys(i for i in (own_eos, *model_eos_token_ids) if i is not None)
        )
        """Tokens that end an answer: the tokenizer's own first, then the model's further ones."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a model folder.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        try:
            return cls._load(folder)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # JSON of the wrong shape, in any of several files.
            raise ConfigError(
                f"the tokenizer files of {folder} cannot be used: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _load(cls, folder: Path) -> "Tokenizer":
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # an old folder
            config |= _read_json(folder / "special_tokens_map.json")
        return cls(
            _read_backend(folder / "tokenizer.json"),
            config,
            model_eos_token_ids=_model_eos_token_ids(folder),
            chat_templates=_chat_templates(folder, config),
        )

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def rule(self) -> PieceRule | None:
        """How tokens become bytes; None where they depend on their neighbours."""
        return self._rule

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, which may have marks.

        Args:
            add_special_tokens: put the begin token before it, where the model wants one. False for
                a rendered chat, whose template writes it.

        Raises:
            InvalidRequestError: the text is no valid Unicode (half a surrogate pair).
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The token ids of several texts, encoded in parallel."""
        has_marks = any(typed_tokens.MARK in text for text in texts)
        backend = self._splitting_backend if has_marks else self._backend
        try:
            encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                "the text is no valid Unicode: it holds half a surrogate pair", "prompt"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of tokens.

        Equal to the library's, but where a run of byte tokens (`<0xE4>`) is no valid UTF-8: there
        the valid characters stay, and only broken ones become U+FFFD.
        """
        if self._rule is None:
            text: str = self._backend.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens
            )
            return text
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        pieces: list[bytes] = []
        is_at_start = True
        for token_id in token_ids:
            piece = b"" if token_id in skipped else self.token_bytes(token_id)
            if piece and is_at_start:
                piece, is_at_start = self.first_token_bytes(token_id), False
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    @functools.cached_property
    def typed_special_tokens(self) -> TypedTokens:
        """To mark special tokens in texts, which are then encoded like any other text."""
        return TypedTokens(self.special_token_texts)

    @functools.cached_property
    def _splitting_backend(self) -> tokenizers.Tokenizer:
        return typed_tokens.splitting(self._backend)

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest name in the vocabulary: how much text a token can stand for."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_name(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that only the embedding has."""
        name: str | None = self._backend.id_to_token(token_id)
        return name

    def token_text(self, token_id: int) -> str:
        """What a token looks like by itself: broken characters as U+FFFD, spaces as they are."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; nothing for an id without a name."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up_bytes(token_id)
        return known

    def first_token_bytes(self, token_id: int) -> bytes:
        """What a token adds as the first of a text."""
        token = self.token_name(token_id)
        if token is None or self._rule is None:
            return self.token_bytes(token_id)
        return self._rule.first_token_bytes(token)

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self.token_name(token_id)
        if token is None:
            return b""
        if self._rule is not None:
            return self._rule.token_bytes(token)
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()


def _rule_of(backend: tokenizers.Tokenizer) -> PieceRule | None:
    # A part of a tokenizer says what it is when it is pickled; the whole file would be megabytes.
    decoder = backend.decoder
    return piece_rule(json.loads(decoder.__getstate__())) if decoder is not None else None


def _prepare(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Bring a tokenizer.json into the state that AutoTokenizer would give it.

    Begin and end tokens are its post-processor's business: `add_bos_token` in tokenizer_config.json
    is for folders without a tokenizer.json.
    """
    backend.no_truncation()
    backend.no_padding()
    backend.add_tokens(_missing_tokens(backend, config, special_tokens))


def _missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> list[tokenizers.AddedToken]:
    """Tokens that only tokenizer_config.json names as added ones."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder", {})
    missing = {
        entry["content"]: tokenizers.AddedToken(
            **{name: entry[name] for name in _ADDED_TOKEN_FIELDS if name in entry}
        )
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))
    }
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for entry in [*special_tokens.values(), *further]:
        if (text := _token_text(entry)) is not None:
            missing.setdefault(text, tokenizers.AddedToken(text, special=True, normalized=False))
    return [token for text, token in missing.items() if text not in known]


def _token_text(entry: Any) -> str | None:
    """A special token in tokenizer_config.json: a string, or an object with its content."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _model_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End tokens of generation_config.json, or else of config.json."""
    config = _read_json(folder / "config.json")
    for source in (
        _read_json(folder / "generation_config.json"),
        config,
        config.get("text_config"),
    ):
        token_ids = (source or {}).get("eos_token_id")
        if isinstance(token_ids, int):
            return (token_ids,)
        if isinstance(token_ids, list):
            return tuple(token_ids)
    return ()


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own come before tokenizer_config.json."""
    templates = {
        file.stem: _read_text(file)
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    inside = config.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if templates or not inside:
        return templates
    try:
        return msgspec.convert(_by_name(inside), dict[str, str])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"the chat_template of {folder} must be a text, or a list of objects with name and"
            " template"
        ) from error


def _by_name(templates: Any) -> Any:
    """In any of the forms that tokenizer_config.json has for them; unchecked."""
    match templates:
        case str():
            return {"default": templates}
        case list():
            return {entry["name"]: entry["template"] for entry in templates}
        case _:
            return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or nothing where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return content


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ConfigError(f"{file.parent} has no tokenizer.json, nor files to make one of")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {str(error)[:300]}") from error
