"""Gated MLPs: gate, up, activation and product in one call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from workers.linear import BLOCK, NativeLinear, PackedLinear
from workers.patcher.parts import linear_parts
from workers.patcher.probe import (
    PROBE_TOKENS,
    Differs,
    agree,
    has_hooks,
    random_input,
    without_hooks,
)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "silu": silu,
}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)), the inner part in one call."""

    def __init__(self, gate_up: PackedLinear, down: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.gate_up_proj(x))
        return down


def replace_mlp(module: nn.Module, backend: NativeLinear) -> GatedMLP | None:
    parts = linear_parts(module, "gate_proj", "up_proj", "down_proj")
    if parts is None:
        return None
    gate, up, down = parts
    if gate.bias is not None or gate.out_features % BLOCK or gate.in_features % 2:
        return None
    activation = _activation_of(module.act_fn)
    if activation is None or has_hooks(gate, up):
        return None
    ours = GatedMLP(backend.pack_gated(gate.weight, up.weight, activation), down)
    x = random_input(PROBE_TOKENS, gate.in_features)
    with without_hooks(down):  # the other ranks are not at this layer
        if not agree(ours(x), module(x)):
            raise Differs
    return ours


def _activation_of(function: Any) -> str | None:
    x = torch.linspace(-6, 6, 97)
    expected = function(x)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(known(x), expected, rtol=1e-4, atol=1e-5):
            return name
    return None
