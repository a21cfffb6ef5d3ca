"""Norms: one kernel instead of six operations."""

import torch
from torch import Tensor, nn

from workers.linear import BLOCK, NativeLinear
from workers.native import Kernels
from workers.patcher.probe import PROBE_TOKENS, Differs, agree, random_input


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, in one pass."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float, rounds_first: bool) -> None:
        super().__init__()
        self.factors, self.eps, self.rounds_first = weight, eps, rounds_first
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernels.rms_norm(x, self.factors, out, self.eps, self.rounds_first)
        return out


def replace_norm(module: nn.Module, backend: NativeLinear) -> RMSNorm | None:
    """Llama's norms multiply by the weight, Gemma's by one more than that; the closest counts."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(module, "weight", None)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if eps is None or not isinstance(weight, Tensor) or len(weight) % BLOCK:
        return None
    x = random_input(PROBE_TOKENS, len(weight))
    expected = module(x)
    candidates = [
        RMSNorm(backend.kernels, weight.float() + offset, float(eps), rounds_first)
        for offset in (0.0, 1.0)
        for rounds_first in (True, False)
    ]
    best = min(candidates, key=lambda c: float((c(x) - expected).float().abs().mean()))
    if not agree(best(x), expected):
        raise Differs
    return best
