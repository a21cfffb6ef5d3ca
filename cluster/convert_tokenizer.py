"""ENTRY, short-lived process: write a tokenizer.json for a model folder that has none.

    python -m cluster.convert_tokenizer FOLDER TARGET

Folders with vocab.json and merges.txt, or with tokenizer.model, are read by transformers. That
costs seconds and 200 MB even with torch hidden, which a serving process need not keep; and a user's
own process, which may want transformers with torch, must not be left with one that has learnt to do
without. So `tokenizer_source` runs this module in a process of its own, on a leash
(`engine/leash.py`).

TARGET gets tokenizer.json and tokenizer_config.json. Standard output ends, with exit code 2, with
a line that says why it does not.
"""

import json
import sys
from pathlib import Path
from typing import Any

from engine import leash
from engine.errors import EXIT_CONFIG, ConfigError


def main(folder: Path, target: Path) -> int:
    leash.hold_on("Tokenizer")
    try:
        convert(folder, target)
    except Exception as error:  # noqa: BLE001  # transformers has all kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        sys.stdout.write(
            f"\n{folder} has no tokenizer.json, and transformers cannot make one: {reason[:300]}\n"
        )
        return EXIT_CONFIG
    return 0


def convert(folder: Path, target: Path) -> None:
    """Write both files.

    Raises:
        ConfigError: what transformers makes of the folder is not for the tokenizers library.
        Exception: transformers can make nothing of it.
    """
    # Hidden before transformers is imported, or that imports torch.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoTokenizer  # not at the top: see the line above

    config = _config(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no form that the tokenizers library reads"
        )
    config |= {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    config["chat_template"] = tokenizer.chat_template
    (target / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _config(folder: Path) -> dict[str, Any]:
    """What the folder itself says of its tokenizer, in one of two files or in both."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # an old folder
        config |= _read_json(folder / "special_tokens_map.json")
    return config


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ConfigError(f"{file.name} must hold a JSON object")
    return content


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
