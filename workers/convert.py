"""ENTRY, short-lived process: a GGUF file to a folder with safetensors, config and tokenizer.

    python -m workers.convert TARGET SOURCE.gguf [PART…]

Started by `cluster.model_source` where the target is missing, and gone afterwards, so neither torch
nor the memory for dequantising stays with a server. transformers reads the file; the weights become
bfloat16, whatever they were packed in. A model without a chat template gets a plain one.

Exit code 2 means that the file cannot be used; standard output then says why, in one line. It is
held on a leash: it ends with its parent (`engine/leash.py`).
"""

import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import leash
from engine.errors import EXIT_CONFIG, ConfigError
from workers.atomic_folder import new_folder
from workers.supported import SUPPORTED_MODEL_TYPES

logger = logging.getLogger("workers.convert")  # not __main__

PLAIN_CHAT_TEMPLATE = Path(__file__).parent / "plain_chat.jinja"

_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
"""What Git leaves in a file's place where it does not fetch large ones."""


def main(target: str, *parts: str) -> int:
    """Convert once; a target that is there already is left alone."""
    leash.hold_on("Convert")
    try:
        convert([Path(part) for part in parts], Path(target))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        return EXIT_CONFIG
    return 0


def convert(parts: Sequence[Path], target: Path) -> None:
    """Write the model of a GGUF file as a folder; nothing is there until all of it is.

    Args:
        parts: the file, or the pieces of it in order.
        target: the folder.

    Raises:
        ConfigError: the file is no GGUF, holds a model that we cannot run, or a package to read it
            with is missing.
    """
    with new_folder(target) as folder:
        if folder is None:
            return
        started = time.monotonic()
        name = source_name(parts)
        logger.info(
            "converting %s, once, which may take minutes; the result goes to %s", name, target
        )
        if len(parts) == 1:
            model, tokenizer = _load(parts[0])
        else:
            # In the draft, so that it goes with it if this process is killed.
            joined = folder / name
            _join(parts, joined)
            model, tokenizer = _load(joined)
            joined.unlink()
        logger.info("converting %s: writing", name)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = PLAIN_CHAT_TEMPLATE.read_text(encoding="utf-8")
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        for file in folder.iterdir():
            shutil.copymode(folder / "config.json", file)  # safetensors leaves its own to the owner
        logger.info("converting %s: done in %.0f s", name, time.monotonic() - started)


def source_name(parts: Sequence[Path]) -> str:
    """The name of the file, also of one that comes in pieces: `m.gguf.part00`, …"""
    return parts[0].name if len(parts) == 1 else Path(parts[0].stem).with_suffix(".gguf").name


def _join(parts: Sequence[Path], file: Path) -> None:
    with file.open("wb") as joined:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, joined, 1 << 20)


def _load(source: Path) -> tuple[Any, Any]:
    """Return transformers' model and tokenizer of a GGUF file."""
    _check_magic(source)
    is_watched = sys.stderr.isatty()
    if not is_watched:
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars would fill a log file
    try:
        _speed_up_reading()
        # Not at the top: seconds of imports, which a caller that waits for another does not need.
        import torch
        import transformers

        if not is_watched:
            transformers.utils.logging.disable_progress_bar()
        where: dict[str, Any] = {
            "pretrained_model_name_or_path": str(source.parent),
            "gguf_file": source.name,
            "local_files_only": True,
        }
        config = transformers.AutoConfig.from_pretrained(**where, trust_remote_code=False)
        _check_type(source, config.model_type)
        logger.info("converting %s: tokenizer", source.name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
        logger.info("converting %s: weights", source.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where,
            trust_remote_code=False,
            dtype=torch.bfloat16,
            # Else the weights stay packed, and transformers refuses to write them.
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    except ImportError as error:
        raise ConfigError(
            f"reading {source.name} needs more packages: `pip install 'raywire[gguf]'` ({error})"
        ) from error
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError) as error:
        raise ConfigError(f"cannot convert {source.name}: {_first_line(error)}") from error
    return _plain(model.to(torch.bfloat16)), tokenizer


def _speed_up_reading() -> None:
    """Parse the file once, and without a memmap object for each of its million strings.

    transformers makes a reader for the config, for the tokenizer and for the weights, and again
    inside these: minutes for a vocabulary of 262144 tokens.
    """
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # untyped
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    gguf.GGUFReader = functools.cache(Reader)


def _plain(model: Any) -> Any:
    """Make transformers forget that the weights were packed, or it refuses to write them."""
    for holder in (model, model.config):
        for name in ("hf_quantizer", "quantization_config", "is_quantized", "quantization_method"):
            if name in vars(holder):
                delattr(holder, name)
    return model


def _check_magic(source: Path) -> None:
    try:
        with source.open("rb") as file:
            begin = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error}") from error
    if begin == _LFS_POINTER:
        raise ConfigError(f"{source.name} stands for a file of Git LFS: `git lfs pull` fetches it")
    if not begin.startswith(_MAGIC):
        what = "it does not begin with the letters GGUF" if begin else "it is empty"
        raise ConfigError(f"{source.name} is no GGUF file: {what}")


def _check_type(source: Path, model_type: str) -> None:
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{source.name} holds architecture {model_type!r}; supported are"
            f" {', '.join(sorted(SUPPORTED_MODEL_TYPES))}"
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
