"""transformers' modules replaced by faster ones, where a probe shows that they do the same.

After loading, before the first step, for bfloat16 on CPU. A rule knows a module by its parts (a
norm has a weight and an epsilon; a gated MLP has three projections and an activation), builds the
replacement, and runs both on random input. Only if the results agree is the module exchanged; if
not, it stays as it was, and one line in the log says so. So an architecture that nobody has thought
of here gets what fits it, and is right in any case.

    norms       one kernel instead of six operations
    MLP         gate, up, activation and product in one call
    attention   query, key and value in one; their norms and rotary embedding in another
    layer       sums and the norms beside them in one
    the rest    every other linear layer packed; a tied embedding reads the packed head
    backbone    all layers in one call

Agreement is judged column by column: relative to the largest output of all, a wrong formula can
hide behind a few large columns.
"""

import ctypes
import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workers.linear import NativeLinear
from workers.patcher.attention import FusedAttention, replace_attention
from workers.patcher.backbone import FusedBackbone, replace_backbone
from workers.patcher.layer import FusedLayer, replace_layer
from workers.patcher.mlp import GatedMLP, replace_mlp
from workers.patcher.norm import replace_norm
from workers.patcher.parts import exchange
from workers.patcher.probe import PROBE_ERRORS, Differs, agree
from workers.patcher.single_layers import pack_linear, patch_tied_embedding
from workers.quantization import quantize

__all__ = ["FusedAttention", "FusedBackbone", "FusedLayer", "GatedMLP", "agree", "patch"]

logger = logging.getLogger(__name__)


@torch.inference_mode()
def patch(model: Any, backend: NativeLinear) -> None:
    """Replace what can be replaced in a loaded model, in place. Weights are used up as they are
    packed: the model needs no more memory afterwards.

    Raises:
        ConfigError: weights are to be quantized, and there are none that can be.
    """
    done: Counter[str] = Counter()
    _apply(_RULES, model, backend, done)
    done["tied embedding"] += patch_tied_embedding(model, backend)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and (packed := pack_linear(name, module, backend)) is not None:
            exchange(model, name, packed)
            done["linear"] += 1
    if backend.quantization is not None:
        done["int8"] += quantize(model)
    _apply({"backbone": replace_backbone}, model, backend, done)
    _return_freed_memory()
    logger.info("modules replaced %s", " ".join(f"{k.replace(' ', '_')}={done[k]}" for k in done))


Rule = Callable[[nn.Module, NativeLinear], nn.Module | None]


def _apply(
    rules: dict[str, Rule], model: nn.Module, backend: NativeLinear, done: Counter[str]
) -> None:
    for kind, rule in rules.items():
        for name, module in list(model.named_modules()):
            if (found := _try(kind, name, module, rule, backend)) is not None:
                exchange(model, name, found)
                done[kind] += 1


def _try(
    kind: str, name: str, module: nn.Module, rule: Rule, backend: NativeLinear
) -> nn.Module | None:
    try:
        return rule(module, backend)
    except Differs:
        logger.info("%s %s left alone: the replacement computes something else", kind, name)
    except PROBE_ERRORS as error:
        logger.info("%s %s left alone: %s", kind, name, " ".join(str(error).split())[:200])
    return None


def _return_freed_memory() -> None:
    """Give the memory of replaced weights back to the system: malloc keeps it otherwise, by our own
    setting (`resources`)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


_RULES: dict[str, Rule] = {
    "norm": replace_norm,
    "mlp": replace_mlp,
    "attention": replace_attention,
    "layer": replace_layer,
}
"""In this order: attention takes over norms that have been replaced, a layer takes over all."""
