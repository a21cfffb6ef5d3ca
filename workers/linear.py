"""Linear layers with packed weights, behind one protocol, and the choice among them.

`choose` says once, in the log, which it is. Measured before ours was written (docs/performance.md):
oneDNN's prepacked layers, reached through torch, are 1.1 to 1.8 times as slow on the few rows of a
decode step, equal on the hundreds of a prefill, and keep a second copy of a tied embedding;
torch.compile changes nothing about the weights.
"""

import logging
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.config import LinearBackendName, Quantization
from engine.errors import ConfigError
from workers import native_build
from workers.native import ACTIVATIONS, Kernels

logger = logging.getLogger(__name__)

BLOCK = 16
"""Outputs that are packed together."""


class PackedLinear(nn.Module):
    """A linear layer over a packed weight, which `pack` made.

    Args:
        kernels: that read it.
        weight: packed bfloat16 `[outputs, inputs]`, outputs filled up to whole blocks.
        bias: as long as the weight, or None.
        num_outputs: without the filling.
        out_dtype: of the result: bfloat16 or float32.
        activation: with one, the weight's blocks are gate and up in turns, and the result is
            activation(gate) · up.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        num_outputs: int,
        out_dtype: torch.dtype = torch.bfloat16,
        activation: str = "none",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], num_outputs
        # Not called `weight`: its order is nobody else's, and who looks for one should fail.
        self.packed, self.packed_bias = weight, bias
        self._kernels = kernels
        self.out_dtype = out_dtype
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=self.out_dtype)
        self._kernels.linear(x.contiguous(), self.packed, self.packed_bias, out, self.activation)
        return out

    def quantize(self) -> None:
        """Make the weight 8-bit integers, which take little more than half of its memory."""
        self.packed = self._kernels.pack_int8(self.packed)


class PackedEmbedding(nn.Module):
    """Rows of a weight that a packed head shares."""

    def __init__(self, head: PackedLinear, scale: Tensor | None) -> None:
        super().__init__()
        self._head = [head]  # in a list: it is a module elsewhere, and has its hooks there
        self.scale = scale

    @property
    def head(self) -> PackedLinear:
        return self._head[0]

    def forward(self, ids: Tensor) -> Tensor:
        head = self.head
        out = torch.empty((*ids.shape, head.in_features), dtype=torch.bfloat16)
        head._kernels.rows(head.packed, ids.contiguous(), out)
        return out if self.scale is None else out * self.scale


class LinearBackend(Protocol):
    """Makes packed layers."""

    name: str

    def pack(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype = torch.bfloat16
    ) -> nn.Module:
        """Return the layer of a weight `[outputs, inputs]`, which is used up: its memory may become
        the packed one's."""


class NativeLinear:
    """See `LinearBackend`. Our kernels; bfloat16 on CPU.

    Args:
        kernels: that compute.
        quantization: of the weights, once `patcher` is done with them.
    """

    def __init__(self, kernels: Kernels, quantization: Quantization | None = None) -> None:
        self.kernels, self.quantization = kernels, quantization
        self.name = "native" if quantization is None else f"native-{quantization}"

    def pack(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype = torch.bfloat16
    ) -> PackedLinear:
        num_outputs = len(weight)
        missing = -num_outputs % BLOCK
        if missing:
            weight = pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else pad(bias, (0, missing))
        weight = weight.contiguous()
        self.kernels.pack(weight)
        return PackedLinear(self.kernels, weight, bias, num_outputs, out_dtype)

    def pack_gated(self, gate: Tensor, up: Tensor, activation: str) -> PackedLinear:
        """Return the layer that computes activation(x @ gate.T) · (x @ up.T). Both have the same
        shape, a multiple of `BLOCK` outputs."""
        num_outputs, num_inputs = gate.shape
        turns = torch.stack([gate.view(-1, BLOCK, num_inputs), up.view(-1, BLOCK, num_inputs)], 1)
        weight = turns.view(2 * num_outputs, num_inputs)
        self.kernels.pack(weight)
        return PackedLinear(self.kernels, weight, None, num_outputs, activation=activation)


def unpack(packed: Tensor) -> Tensor:
    """Return a packed weight in the usual order, filling included: what packing does, backwards."""
    num_outputs, num_inputs = packed.shape
    groups = packed.view(num_outputs // BLOCK, num_inputs // 2, BLOCK, 2)
    return groups.transpose(1, 2).reshape(num_outputs, num_inputs)


def choose(
    dtype: torch.dtype,
    device: torch.device,
    cache_dir: str | None,
    num_threads: int,
    wanted: LinearBackendName = "auto",
    quantization: Quantization | None = None,
) -> NativeLinear | None:
    """Return the back end for a model's linear layers; None leaves them, and all else that our
    kernels do, to torch.

    Args:
        dtype: of the weights.
        device: of the weights.
        cache_dir: where kernels are built; None builds none.
        num_threads: that share the work.
        wanted: `--linear-backend`.
        quantization: `--quantization`, which only our kernels have.

    Raises:
        ConfigError: "native" or a quantization is wanted, and cannot be had.
    """
    flag = "--linear-backend native" if wanted == "native" else None
    flag = flag if quantization is None else f"--quantization {quantization}"
    if wanted == "torch":
        if quantization is not None:
            raise ConfigError(f"{flag} is done by raywire's kernels, not by --linear-backend torch")
        return None
    if device.type != "cpu" or dtype != torch.bfloat16 or cache_dir is None:
        if flag is not None:
            raise ConfigError(f"{flag} is for bfloat16 on CPU; this is {dtype} on {device.type}")
        return None
    try:
        load = native_build.load if flag is None else native_build.require
        kernels = load(Path(cache_dir), num_threads)
    except ConfigError as error:
        raise ConfigError(f"{flag}: no kernels: {error}") from error
    if kernels is None:
        return None
    logger.info("linear layers packed arithmetic=%s threads=%d", kernels.arithmetic, num_threads)
    return NativeLinear(kernels, quantization)
