"""Which model folders the workers can load, checked without torch.

`cluster` calls `check_model_folder` before anything starts, so that a folder that cannot work costs
one line and no process. `loader` checks again what only torch can see: names and shapes of weights.
"""

import json
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

SCRIPTED = "scripted"
"""`model_type` of the scripted model (`workers/scripted.py`), which has no weights."""

SCRIPTED_KV_BYTES_PER_TOKEN = 64
"""What its tokens pretend to need in the KV cache, so that scheduling and preemption are real."""

SCRIPTED_KV_CACHE_BYTES = 16 << 20
"""Unless told otherwise: 262,144 tokens. A million blocks would cost the scheduler real memory."""

SUPPORTED_MODEL_TYPES = frozenset(
    {"gemma3", "gemma3_text", "gpt2", "llama", "mistral", "qwen2", "qwen3", SCRIPTED}
)
"""Architectures whose tokens are tested against transformers' own. Of `gemma3`, the text model."""

INDEX_FILE = "model.safetensors.index.json"

_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def check_model_folder(path: str | Path) -> str:
    """Return the `model_type` of a model folder that can be loaded.

    Raises:
        ConfigError: the folder, its config.json or a weight file is missing or broken, or the
            architecture is not one of ours. One line that says which.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    model_type = _model_type(folder)
    if model_type != SCRIPTED:
        weight_files(folder)
    return model_type


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json")
    return _read_json(folder / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: all that its index names, or all there are."""
    if (index := folder / INDEX_FILE).is_file():
        files = _files_of_index(index)
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {folder} has no *.safetensors file; {_advice(folder)}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(
            f"model folder {folder} is incomplete: {len(missing)} of {len(files)} weight files in"
            f" {INDEX_FILE} are missing, the first is {missing[0]}"
        )
    return files


def _advice(folder: Path) -> str:
    """What to do about a folder without weights that are loaded."""
    pickles = sorted(each.name for each in folder.iterdir() if each.suffix in _PICKLED)
    if not pickles:
        return "other weight formats are not loaded"
    return (
        f"{pickles[0]} is a pickle, which can run code when it is read, so it is never loaded:"
        " use the model's safetensors version, or convert it where you trust the file"
    )


def _model_type(folder: Path) -> str:
    config = read_config(folder)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in SUPPORTED_MODEL_TYPES:
        listed = config.get("architectures")
        names = ", ".join(map(str, listed)) if isinstance(listed, list) and listed else "unnamed"
        raise ConfigError(
            f"model folder {folder} has architecture {model_type!r} ({names}); supported are"
            f" {', '.join(sorted(SUPPORTED_MODEL_TYPES))}"
        )
    if "quantization_config" in config:
        raise ConfigError(
            f"model folder {folder} is quantised (quantization_config in config.json); only"
            " float32, bfloat16 and float16 weights are loaded"
        )
    return model_type


def _files_of_index(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    # A shard is a file beside the index; a name with a path in it would reach outside the folder.
    if stray := [name for name in names if Path(name).name != name]:
        raise ConfigError(f"{index} names a weight file outside the model folder: {stray[0]}")
    if others := [name for name in names if not name.endswith(".safetensors")]:
        raise ConfigError(f"{index} names {others[0]}; only *.safetensors files are loaded")
    return [index.parent / name for name in names]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return content
