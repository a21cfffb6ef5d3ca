"""Weights of a model as 8-bit integers: `--quantization int8`, on CPU.

`patcher` calls `quantize` when the linear layers are packed as bfloat16 and have been shown to be
what they replace. How integers are packed, and why that loses little, is in `kernels/int8.h`. All
else stays as it is: norms, attention, an untied embedding, layers that are left to torch.
"""

from typing import Any

from engine.errors import ConfigError
from workers.linear import PackedLinear


def quantize(model: Any) -> int:
    """Turn the weights of all packed linear layers into integers, one after the other: at no time
    is the model there twice. Returns how many layers that were.

    Raises:
        ConfigError: there is none.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if not layers:
        raise ConfigError("--quantization int8: the model has no linear layer that it is for")
    for layer in layers:
        layer.quantize()
    return len(layers)


def weight_bytes(model: Any) -> int:
    """Return what the weights of a quantized model take, norms left out."""
    packed = [m.packed for m in model.modules() if isinstance(m, PackedLinear)]
    return sum(int(weight.nbytes) for weight in (*packed, *model.parameters()))
