"""Figures in a document that people have written."""

from pathlib import Path


def write_into(file: Path, markdown: str) -> None:
    """Replace the figures in a document by newer ones; what is written around them stays. They are
    those between the same first and last line as in `markdown`; without these nothing happens."""
    text = file.read_text(encoding="utf-8")
    first, *_, last = markdown.splitlines()
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last + "\n")
    if bool(begin) != bool(end):
        raise ValueError(f"{file} has only one of the lines {first} and {last}")
    if begin:
        file.write_text(before + markdown + after, encoding="utf-8")
