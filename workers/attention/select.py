"""Which back end a device gets, and the function through which transformers' models reach it.

transformers lets attention be registered by name; because ours is not among its mask builders, it
builds no mask. The model calls `_attend` once per layer with this step's query, key and value, and
everything else comes from the forward context.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.errors import ConfigError
from workers import forward_context, kv_cache
from workers.attention.base import AttentionBackend, AttentionCall
from workers.attention.cpu import CpuAttention
from workers.attention.reference import ReferenceAttention

IMPLEMENTATION = "raywire"
"""Our `attn_implementation` in a model's config."""


def select_backend(name: str | None, device: torch.device) -> AttentionBackend:
    """Return the back end of that name, or the fastest for the device.

    Raises:
        ConfigError: there is none of that name, or it does not run on the device.
    """
    match name or ("varlen" if device.type == "cuda" else "cpu"):
        case "reference":
            return ReferenceAttention()
        case "cpu" if device.type == "cpu":
            return CpuAttention()
        case "varlen" if device.type == "cuda":
            # Imported here, because the kernel loads CUDA libraries.
            from workers.attention.varlen import VarlenAttention

            return VarlenAttention()
        case other:
            raise ConfigError(
                f"--attention-backend {other} does not exist on {device.type}: there are reference,"
                " cpu (on cpu) and varlen (on cuda)"
            )


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)


def _attend(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Return attention of all requests' queries, `[1, T, H, D]`: transformers' interface."""
    assert attention_mask is None, "masks are ours: see BatchLayout"
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError("this model's attention looks ahead; only causal models are served")
    context = forward_context.current()
    kv = context.kv_cache[int(module.layer_idx)]  # type: ignore[arg-type]
    kv_cache.write(
        kv, key_1KTD[0].transpose(0, 1), value_1KTD[0].transpose(0, 1), context.layout.slot_mapping
    )
    call = AttentionCall(
        scale=query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling,
        # Most models pass the window of the layer; some only keep it on the module.
        window=sliding_window or getattr(module, "sliding_window", None),
        softcap=softcap,
        sinks=s_aux,
    )
    out_THD = context.backend.forward(call, query_1HTD[0].transpose(0, 1), kv)
    return out_THD[None], None
