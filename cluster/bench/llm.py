"""The `LLM` that `raywire bench latency` and `throughput` measure."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from api import LLM
from cluster import environment
from cluster.model_source import resolve


@contextlib.contextmanager
def loaded(model: str, engine: Mapping[str, Any]) -> Iterator[tuple[LLM, Path]]:
    """The model, loaded for as long as the block, and its folder."""
    folder = resolve(model, cache_dir=environment.read(os.environ).cache_dir)
    with LLM(str(folder), **engine) as llm:
        yield llm, folder
