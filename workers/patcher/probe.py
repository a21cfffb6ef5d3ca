"""Whether a replacement does the same as the original: random input, agreement by column.

A rule that finds a difference raises `Differs`; what a module raises that only looked like one of
ours is in `PROBE_ERRORS`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

PROBE_TOKENS = 16
TOLERANCE = 0.03
"""Root of the mean squared difference of a column, relative to the column's own. Rounding to
bfloat16 makes 0.002 of it; a wrong formula ten times the tolerance."""

PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)
"""What a module raises that looked like one of ours and wants something else."""


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results are the same but for rounding. The last dimension are the columns."""
    if ours.shape != theirs.shape:
        return False
    columns = theirs.shape[-1]
    ours, theirs = (x.float().reshape(-1, columns) for x in (ours, theirs))
    difference = (ours - theirs).square().mean(0).sqrt()
    size = theirs.square().mean(0).sqrt()
    # A column of (almost) nothing is judged by the others.
    bound = TOLERANCE * torch.maximum(size, 1e-3 * size.mean())
    return bool((difference <= bound).all())


class Differs(Exception):
    """A replacement that does not do the same."""


def random_input(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def has_hooks(*modules: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Leave out a module's hooks for a while."""
    dicts: list[Any] = [module._forward_hooks, module._forward_pre_hooks]
    kept = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(dicts, kept, strict=True):
            hooks.update(before)
