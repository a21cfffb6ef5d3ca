"""The folder of `raywire serve scripted`: a config with a script and a tokenizer for any text.

Used by `model_source`. What a script may say is in `workers/script.py`, what the model makes of it
in `workers/scripted.py`. One token is one byte of UTF-8, so every text is its own list of tokens:

    0 … 255   the byte          258   <|turn|>, before each message of a chat
    256       <s>               259   <pad>
    257       </s>, the end
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError
from workers.atomic_folder import new_folder
from workers.script import ScriptedConfig

SPECIAL_TOKENS = ("<s>", "</s>", "<|turn|>", "<pad>")
FIRST_SPECIAL_ID = 256
EOS_TOKEN_ID = FIRST_SPECIAL_ID + SPECIAL_TOKENS.index("</s>")
VOCAB_SIZE = FIRST_SPECIAL_ID + len(SPECIAL_TOKENS)

MAX_LENGTH = 32768
"""Its longest prompt and output. There is nothing to compute, so it costs cache only."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|turn|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>{% endif %}"
)
"""Special tokens are left out of answers, so an echo of a chat reads as what was said."""


def scripted_folder(cache_dir: Path, script: Mapping[str, Any]) -> Path:
    """Return the folder of a scripted model, which is written unless it is there.

    Args:
        cache_dir: where converted models are kept.
        script: fields of `workers.script.Script`.

    Raises:
        OSError: the cache cannot be written.
    """
    files = {
        "config.json": _config(script),
        "generation_config.json": {"eos_token_id": EOS_TOKEN_ID},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": _tokenizer_config(),
    }
    content = {name: json.dumps(value, indent=1) for name, value in files.items()}
    # Under the hash of all that is in it: another script, or another version, is another folder.
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    target = cache_dir / "models" / f"scripted-{key}"
    with new_folder(target) as folder:
        if folder is not None:
            for name, text in content.items():
                (folder / name).write_text(text, encoding="utf-8")
    return target


def read_script(file: Path) -> dict[str, Any]:
    """Read a script from a JSON file.

    Raises:
        ConfigError: there is none, it is no JSON object, or the model cannot play it.
    """
    try:
        script = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read the script {file}: {error}") from error
    if not isinstance(script, dict):
        raise ConfigError(f'the script {file} must be a JSON object such as {{"kind": "echo"}}')
    try:
        msgspec.convert(_config(script), ScriptedConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"cannot use the script {file}: {error}") from error
    return script


def _config(script: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "scripted",
        "architectures": ["ScriptedModel"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": FIRST_SPECIAL_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "script": dict(script),
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _tokenizer() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": FIRST_SPECIAL_ID + i,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, content in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's byte-level vocabularies: the byte itself if
    it prints, else the next letter after U+00FF."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + others.index(byte)) for byte in range(256)]
