"""A tokenizer.json for model folders that come without one: with vocab.json and merges.txt, or with
tokenizer.model.

Used by `model_source`, on each node before anything starts, so that API servers and engine cores
read the same file: those make tokens of texts by it, these masks of structured output. The
conversion is kept in the cache, as a folder that has it and links to all else.
"""

import hashlib
import logging
import subprocess
from importlib import metadata
from pathlib import Path

from engine import leash
from engine.errors import ConfigError
from engine.lifecycle import describe_exit
from workers.atomic_folder import new_folder

logger = logging.getLogger(__name__)

_SOURCES = (
    "vocab.json",
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""What a tokenizer.json can be made of."""

_REPLACED = ("tokenizer_config.json", "special_tokens_map.json")
"""They go into the conversion's own tokenizer_config.json."""

_TIMEOUT_S = 120.0


def with_tokenizer(folder: Path, cache_dir: Path) -> Path:
    """Return a model folder that has a tokenizer.json: the given one if it does, or if nothing in
    it could be converted.

    Args:
        folder: of a model.
        cache_dir: where conversions are kept.

    Raises:
        ConfigError: it cannot be converted.
        OSError: the cache cannot be written.
    """
    has_source = any((folder / name).is_file() for name in _SOURCES)
    if (folder / "tokenizer.json").is_file() or not has_source:
        return folder
    target = cache_dir / "models" / f"{folder.name}-tokenizer-{_key(folder)}"
    with new_folder(target) as draft:
        if draft is not None:
            logger.info("converting the tokenizer of %s", folder)
            _convert(folder, draft)
            for entry in folder.iterdir():
                if entry.name not in _REPLACED:
                    (draft / entry.name).symlink_to(entry)
    return target


def _key(folder: Path) -> str:
    """Another one whenever a file of the folder has changed, come or gone."""
    digest = hashlib.sha256(f"{folder}\0{metadata.version('transformers')}".encode())
    for entry in sorted(entry for entry in folder.iterdir() if entry.exists()):
        stat = entry.stat()
        digest.update(f"\0{entry.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _convert(folder: Path, target: Path) -> None:
    try:
        done = leash.run_module(
            "cluster.convert_tokenizer",
            str(folder),
            str(target),
            timeout_s=_TIMEOUT_S,
            is_quiet=True,  # transformers says that it misses torch
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and converting its tokenizer took over"
            f" {_TIMEOUT_S:.0f} s"
        ) from error
    if done.returncode:
        words = done.stdout.strip().rpartition("\n")[2]
        raise ConfigError(
            words or f"converting the tokenizer of {folder} {describe_exit(done.returncode)}"
        )
