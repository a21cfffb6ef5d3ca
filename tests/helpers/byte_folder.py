"""A tokenizer folder in which token id and byte are the same, so tests can read tokens as text."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = 256
"""The end token, `</s>`."""

VOCAB_SIZE = 300
"""Rows of the embedding: more than the tokenizer has names for, as in many real models."""

CHAT_TEMPLATE = """\
{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('robots may not \
speak') }}{% endif %}<{{ message.role }}>{{ message.content }}{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


def make(folder: Path) -> Path:
    """Write tokenizer.json, tokenizer_config.json and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {char: byte for byte, char in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}), encoding="utf-8")
    return folder


def _characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
