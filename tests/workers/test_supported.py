"""A model folder that cannot work is refused with one clear line, before torch is imported."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ConfigError
from workers.supported import SUPPORTED_MODEL_TYPES, check_model_folder


def write_folder(
    folder: Path, config: object, weights: tuple[str, ...] = ("m.safetensors",)
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in weights:
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("model_type", sorted(SUPPORTED_MODEL_TYPES))
def test_supported_types_are_accepted(tmp_path: Path, model_type: str) -> None:
    """A folder with a known architecture and weights is good, and its type is returned."""
    assert check_model_folder(write_folder(tmp_path, {"model_type": model_type})) == model_type


def test_scripted_model_needs_no_weights(tmp_path: Path) -> None:
    """The scripted model is its config.json alone."""
    folder = write_folder(tmp_path, {"model_type": "scripted"}, weights=())
    assert check_model_folder(folder) == "scripted"


def add_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "m.safetensors", "b": "gone.safetensors"}})
    )


def add_stray_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../m.safetensors"}})
    )


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot read .*config.json"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "cannot read .*config.json"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "cannot read .*config.json"),
        (lambda f: (f / "config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda f: write_folder(f, {"model_type": "bert"}), "'bert'.*supported are gemma3, "),
        (lambda f: write_folder(f, {}), "architecture None"),
        (lambda f: write_folder(f, {"model_type": ["llama"]}), r"architecture \['llama'\]"),
        (lambda f: write_folder(f, {"architectures": 3}), "architecture None"),
        (
            lambda f: write_folder(f, {"model_type": "llama", "quantization_config": {}}),
            "is quantised",
        ),
        (lambda f: (f / "m.safetensors").unlink(), "has no \\*.safetensors file"),
        (add_index, "1 of 2 weight files in .* are missing, the first is gone.safetensors"),
        (add_stray_index, "outside the model folder: ../m.safetensors"),
    ],
)
def test_broken_folders_are_refused(
    tmp_path: Path, break_it: Callable[[Path], object], message: str
) -> None:
    """Each way of being broken has its own line."""
    folder = write_folder(tmp_path, {"model_type": "llama"})
    break_it(folder)

    with pytest.raises(ConfigError, match=message) as error:
        check_model_folder(folder)

    assert "\n" not in str(error.value)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    """A path that is not there is named."""
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        check_model_folder(tmp_path / "nowhere")


def test_check_imports_no_torch() -> None:
    """The check is for processes that must never import torch."""
    code = "import sys, workers.supported; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
