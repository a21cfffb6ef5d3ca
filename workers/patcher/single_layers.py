"""Every other linear layer, packed; a tied embedding that reads the packed head."""

import logging
from typing import Any

import torch
from torch import nn

from workers.linear import NativeLinear, PackedEmbedding, PackedLinear, unpack
from workers.patcher.parts import exchange
from workers.patcher.probe import PROBE_TOKENS, agree, random_input, without_hooks

logger = logging.getLogger(__name__)


def pack_linear(name: str, linear: nn.Linear, backend: NativeLinear) -> PackedLinear | None:
    """Return the packed layer, or None where it must stay as it is."""
    if linear.in_features % 2 or linear.weight.dtype != torch.bfloat16:
        return None
    x = random_input(PROBE_TOKENS, linear.in_features)
    expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
    out_dtype = torch.float32 if name == "lm_head" else torch.bfloat16
    packed = backend.pack(linear.weight.data, linear.bias, out_dtype)
    if agree(packed(x), expected):
        return packed
    logger.warning("linear %s left alone: packed, it computes something else", name)
    linear.weight = nn.Parameter(unpack(packed.packed)[: linear.out_features], requires_grad=False)
    return None


def patch_tied_embedding(model: Any, backend: NativeLinear) -> int:
    """Pack the head that shares its weight with the embedding, and let the embedding read that.
    Returns how many there were."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        return 0
    if head.weight is not embedding.weight or head.in_features % 2:
        return 0
    names = {id(module): name for name, module in model.named_modules()}
    head_name, embedding_name = names[id(head)], names[id(embedding)]
    ids = torch.arange(PROBE_TOKENS) * (len(head.weight) // PROBE_TOKENS)
    with without_hooks(embedding):
        expected = embedding(ids)
    packed = pack_linear(head_name, head, backend)
    if packed is None:
        embedding.weight = head.weight
        return 0
    scale = getattr(embedding, "embed_scale", None)
    ours = PackedEmbedding(packed, None if scale is None else scale.to(torch.bfloat16))
    if not torch.equal(ours(ids), expected):
        logger.warning("tied embedding left alone: packed, it computes something else")
        head.weight = embedding.weight = nn.Parameter(
            unpack(packed.packed)[: head.out_features], requires_grad=False
        )
        return 0
    exchange(model, head_name, packed)
    exchange(model, embedding_name, ours)
    return 1
