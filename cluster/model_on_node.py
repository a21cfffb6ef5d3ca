"""The model of a server on nodes where the command is not: what travels there, and the folder that
it becomes.

Each node finds the model by itself, in its own cache: `demo` is converted there and a hub id
downloaded, once, also where several ranks share the node (`workers.atomic_folder`). A script is
sent, since it is small and its file is the user's; folders and .gguf files must be there already,
under the same path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import ResolvedModel
from cluster.model_source import resolve
from cluster.scripted_source import read_script, scripted_folder
from engine.errors import ConfigError
from workers.supported import check_model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableModel:
    """A model as other nodes can find it."""

    name: str
    """As the user gave it; a path of the command's node is absolute, since the working folder
    elsewhere is another."""

    script: Mapping[str, Any] | None = None
    """Of `scripted:FILE`."""


def make_portable(model: str) -> PortableModel:
    """Prepare what the user named for the journey. On the command's node, after `resolve`.

    Raises:
        ConfigError: its script cannot be read.
    """
    if model.startswith("scripted:"):
        file = Path(model.removeprefix("scripted:")).expanduser()
        return PortableModel(name=model, script=read_script(file))
    return PortableModel(name=absolute_name(model))


def absolute_name(model: str) -> str:
    """What the user named, so that it does not depend on the working folder."""
    prefix = "scripted:" if model.startswith("scripted:") else ""
    path = Path(model.removeprefix(prefix)).expanduser()
    is_path = model not in ("demo", "scripted") and path.exists()
    return f"{prefix}{path.absolute()}" if is_path else model


def resolve_portable(model: PortableModel, *, cache_dir: Path) -> ResolvedModel:
    """Turn a model into a local folder, on whatever node this is.

    Raises:
        ConfigError: it is not here, or cannot be downloaded, converted or loaded.
    """
    if model.script is None:
        folder = resolve(model.name, cache_dir=cache_dir)
    else:
        try:
            folder = scripted_folder(cache_dir, model.script)
        except OSError as error:
            raise ConfigError(f"cannot write the script to {cache_dir}: {error}") from error
    return ResolvedModel(name=model.name, path=folder, model_type=check_model_folder(folder))
