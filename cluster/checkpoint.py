"""What lies in a model folder's weight files, from their headers: names and shapes, no weights.

Used by the dry run. A safetensors file begins with the length of its header (u64, little-endian)
and the header, a JSON object: tensor name to dtype, shape and place.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from workers.supported import weight_files

Shape = tuple[int, ...]

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def read_tensor_shapes(folder: Path) -> dict[str, Shape]:
    """Name and shape of every tensor in a model folder.

    Raises:
        ConfigError: a weight file is missing or broken.
    """
    shapes: dict[str, Shape] = {}
    for file in weight_files(folder):
        try:
            shapes.update(_shapes(_read_header(file)))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"cannot read weight file {file}: {error}") from error
    return shapes


def _read_header(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= num_bytes <= _MAX_HEADER_BYTES:
            raise ValueError("it is no safetensors file")
        header = json.loads(stream.read(num_bytes))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header


def _shapes(header: Mapping[str, Any]) -> dict[str, Shape]:
    return {
        name: tuple(int(size) for size in tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }
