"""What must be equal on all ranks of a server: code, packages, model and tokenizer.

Each engine core takes its fingerprint while it starts and sends it in READY; the API server refuses
a rank that differs and says in what. Cheap on purpose (tens of milliseconds): weights count by name
and size, everything else by content, and no package is imported to learn its version.
"""

import hashlib
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from engine.config import Quantization
from engine.wire import PROTOCOL_VERSION, Fingerprint

OUR_PACKAGES = ("api", "cluster", "engine", "workers")
CODE_SUFFIXES = (".py", ".cpp", ".h")

OTHER_PACKAGES = (
    "jinja2",
    "llguidance",
    "msgspec",
    "numpy",
    "pyzmq",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
"""Those whose version can change tokens, numbers or bytes on a wire."""

TOKENIZER_FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def take(model_folder: str | Path, quantization: Quantization | None = None) -> Fingerprint:
    """Return the fingerprint of this process, serving the model in that folder."""
    folder = Path(model_folder)
    return Fingerprint(
        protocol=PROTOCOL_VERSION,
        code=_hash_files(Path(__file__).parent.parent, _code_files()),
        packages=dict(_package_versions()),
        model=_hash_model(folder, quantization),
        tokenizer=_hash_files(folder, (folder / name for name in TOKENIZER_FILES)),
    )


def differences(ours: Fingerprint, theirs: Fingerprint) -> list[str]:
    """Return what differs, one entry each, as an operator reads it; empty if nothing does."""
    found = [
        f"{name} {getattr(theirs, name)} instead of {getattr(ours, name)}"
        for name in ("protocol", "code", "model", "tokenizer")
        if getattr(ours, name) != getattr(theirs, name)
    ]
    for name in sorted(ours.packages.keys() | theirs.packages.keys()):
        have, want = theirs.packages.get(name, "absent"), ours.packages.get(name, "absent")
        if have != want:
            found.append(f"{name} {have} instead of {want}")
    return found


def _code_files() -> Iterator[Path]:
    root = Path(__file__).parent.parent
    for package in OUR_PACKAGES:
        for suffix in CODE_SUFFIXES:
            yield from (root / package).rglob(f"*{suffix}")


def _package_versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in OTHER_PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "absent"


def _hash_model(folder: Path, quantization: Quantization | None) -> str:
    digest = hashlib.sha256((quantization or "").encode())
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}".encode())
    return digest.hexdigest()[:16]


def _hash_files(root: Path, paths: Iterable[Path]) -> str:
    """Hash names (below `root`) and contents of the files that exist, whatever order they come
    in."""
    digest = hashlib.sha256()
    for path in sorted(set(paths)):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:16]
