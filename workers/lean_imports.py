"""Imports transformers' modelling code without two large parts of torch that nobody here uses.

That code decorates some functions for torch.compile, which brings the whole compiler, and has
methods for models that are spread by DTensor. Both are 900 modules, a third of a worker's import
time and 60 MiB of its memory. We compile nothing, and our ranks have groups of their own
(`parallel`), so while transformers is imported

- `torch._dynamo` is a stand-in whose decorators leave a function as it is. Whatever else it is
  asked for, it gives way to the real one.
- torch says that it has been built without its distributed part. transformers knows such builds.

Used by `worker` and `loader`. After the block torch is as it was.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed

_NAME = "torch._dynamo"


class _NoCompiler(ModuleType):
    """Stands in for `torch._dynamo`."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        # Where parts of the package lie that do without the rest.
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]

    @staticmethod
    def disable(function: Any = None, *_: object, **__: object) -> Any:
        return _unchanged if function is None else function

    allow_in_graph = assume_constant_result = staticmethod(lambda function: function)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.give_way()
        return getattr(importlib.import_module(_NAME), name)

    def stand_in(self) -> None:
        sys.modules[_NAME] = torch._dynamo = self

    def give_way(self) -> None:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        if vars(torch).get("_dynamo") is self:
            del torch._dynamo


def _unchanged(function: Any) -> Any:
    return function


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """See the head of the file. Changes nothing where the compiler has been imported before."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = _NoCompiler()
    is_available = torch.distributed.is_available
    stand_in.stand_in()
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        stand_in.give_way()
