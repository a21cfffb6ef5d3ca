"""Folders of scripted models with scripts of our own, on the tokenizer of `raywire serve scripted`.

One token is one byte of text, so prompts and answers can be read.
"""

import json
import shutil
from pathlib import Path

from cluster.model_source import resolve


def make_scripted_model(folder: Path, **script: object) -> Path:
    """Write a scripted model into `folder`, which is made, and return it.

    Args:
        folder: where.
        script: fields of `workers.scripted.Script`.
    """
    shutil.copytree(resolve("scripted", cache_dir=folder.parent / "cache"), folder)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["script"] = script
    config_path.write_text(json.dumps(config))
    return folder


def make_slow_model(folder: Path, step_delay_s: float = 0.02) -> Path:
    """One that says `abc` for ever, at so many seconds a step."""
    return make_scripted_model(
        folder, kind="cycle", token_ids=list(b"abc"), step_delay_s=step_delay_s
    )
