"""Types of options that click lacks: values as vLLM's users write them. Used by `options`."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import click

from engine.config import DType

_DTYPES: dict[str, DType] = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}

_PLAIN_TEXT = re.compile(r"[^\[\]{}\"',\s]+")

_SUFFIXES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


class HumanInt(click.ParamType[int | Literal["auto"]]):
    """An integer, also written 8k (8000) or 8K (8192); with `auto`, the word too."""

    name = "integer"

    def __init__(self, *, is_auto_allowed: bool = False) -> None:
        self._is_auto_allowed = is_auto_allowed

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Literal["auto"]:
        text = str(value).strip()
        if self._is_auto_allowed and text in ("auto", "-1"):
            return "auto"
        factor = _SUFFIXES.get(text[-1:], 1)
        digits = text[:-1] if factor > 1 else text
        try:
            return int(digits) if factor == 1 else int(float(digits) * factor)
        except (ValueError, OverflowError):
            hint = " or auto" if self._is_auto_allowed else ""
            self.fail(f"{text!r} is not an integer (8192, 8K, 8.2k){hint}", param, ctx)


class DTypeName(click.Choice[str]):
    """A type of numbers by any of its names."""

    def __init__(self) -> None:
        super().__init__(list(_DTYPES))

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> DType:
        return _DTYPES[super().convert(value, param, ctx)]


class PortRange(click.ParamType[tuple[int, int]]):
    """Two ports: `29500-29599`."""

    name = "first-last"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        first, dash, last = str(value).partition("-")
        if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
            self.fail(f"{value!r} is not a range of ports (29500-29599)", param, ctx)
        return int(first), int(last)


class JsonTexts(click.ParamType[tuple[str, ...]]):
    """Texts as a JSON list: `["a", "b"]`. One that is no JSON is a list of itself."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            texts = json.loads(value)
        except ValueError:
            # Nobody means a list that was cut off, or several, as the name of one.
            texts = [value] if _PLAIN_TEXT.fullmatch(value) else None
        if isinstance(texts, str):
            texts = [texts]
        if not (isinstance(texts, list) and all(isinstance(each, str) for each in texts)):
            self.fail(f"""{value!r} is not a JSON list of texts ('["a", "b"]')""", param, ctx)
        return tuple(texts)


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object: `{"temperature": 0.7}`."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            self.fail(f"""{value!r} is not a JSON object ('{{"top_p": 0.9}}')""", param, ctx)
        return read


class GenerationSource(click.ParamType[str]):
    """`auto`, `vllm`, or a folder, which then has a path that holds in any working folder."""

    name = "auto|vllm|folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value if value in ("auto", "vllm") else str(Path(value).expanduser().absolute())


class FamilyName(click.Choice[str]):
    """One of many names, or auto. The help does not list them; an error does."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(["auto", *names])

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "NAME"
