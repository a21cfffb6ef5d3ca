"""Scripted models with scripts of our own, on the tokenizer of `raywire serve scripted`.

One token is one byte of text, so prompts and answers can be read.
"""

from pathlib import Path

from cluster.scripted_source import scripted_folder


def make_scripted_model(folder: Path, **script: object) -> Path:
    """Write a scripted model somewhere below `folder`, and return where.

    Args:
        folder: made if it is not there.
        script: fields of `workers.scripted.Script`.
    """
    return scripted_folder(folder, script)


def make_slow_model(folder: Path, step_delay_s: float = 0.02) -> Path:
    """One that says `abc` for ever, at so many seconds a step."""
    return make_scripted_model(
        folder, kind="cycle", token_ids=list(b"abc"), step_delay_s=step_delay_s
    )
