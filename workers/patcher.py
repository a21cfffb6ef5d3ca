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

Agreement is judged column by column: relative to the largest output of all, a wrong formula can
hide behind a few large columns.
"""

import contextlib
import ctypes
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from workers.attention.base import AttentionCall
from workers.forward_context import BatchLayout, ForwardContext, current, forward_context
from workers.kv_cache import LayerKV
from workers.linear import BLOCK, NativeLinear, PackedEmbedding, PackedLinear, unpack
from workers.native import Kernels

logger = logging.getLogger(__name__)

PROBE_TOKENS = 16
TOLERANCE = 0.03
"""Root of the mean squared difference of a column, relative to the column's own. Rounding to
bfloat16 makes 0.002 of it; a wrong formula ten times the tolerance."""

_PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)
"""What a module raises that looked like one of ours and wants something else."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "silu": silu,
}


@torch.inference_mode()
def patch(model: Any, backend: NativeLinear) -> None:
    """Replace what can be replaced in a loaded model, in place. Weights are used up as they are
    packed: the model needs no more memory afterwards."""
    done: Counter[str] = Counter()
    for kind, rule in _RULES.items():
        for name, module in list(model.named_modules()):
            if (found := _try(kind, name, module, rule, backend)) is not None:
                _exchange(model, name, found)
                done[kind] += 1
    done["tied embedding"] += _patch_tied_embedding(model, backend)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and (packed := _pack(name, module, backend)) is not None:
            _exchange(model, name, packed)
            done["linear"] += 1
    _return_freed_memory()
    logger.info("modules replaced %s", " ".join(f"{k.replace(' ', '_')}={done[k]}" for k in done))


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


Rule = Callable[[nn.Module, NativeLinear], nn.Module | None]


def _try(
    kind: str, name: str, module: nn.Module, rule: Rule, backend: NativeLinear
) -> nn.Module | None:
    try:
        return rule(module, backend)
    except _Differs:
        logger.info("%s %s left alone: the replacement computes something else", kind, name)
    except _PROBE_ERRORS as error:
        logger.info("%s %s left alone: %s", kind, name, " ".join(str(error).split())[:200])
    return None


class _Differs(Exception):
    """A replacement that does not do the same."""


def _exchange(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    original = model.get_submodule(name)
    # Collectives between tensor ranks are hooks.
    module._forward_hooks.update(original._forward_hooks)
    module._forward_pre_hooks.update(original._forward_pre_hooks)
    setattr(model.get_submodule(parent), leaf, module.eval())


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


# Norms


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


def _norm(module: nn.Module, backend: NativeLinear) -> RMSNorm | None:
    """Llama's norms multiply by the weight, Gemma's by one more than that; the closest counts."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(module, "weight", None)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if eps is None or not isinstance(weight, Tensor) or len(weight) % BLOCK:
        return None
    x = _random(PROBE_TOKENS, len(weight))
    expected = module(x)
    candidates = [
        RMSNorm(backend.kernels, weight.float() + offset, float(eps), rounds_first)
        for offset in (0.0, 1.0)
        for rounds_first in (True, False)
    ]
    best = min(candidates, key=lambda c: float((c(x) - expected).float().abs().mean()))
    if not agree(best(x), expected):
        raise _Differs
    return best


# MLP


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)), the inner part in one call."""

    def __init__(self, gate_up: PackedLinear, down: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.gate_up_proj(x))
        return down


def _mlp(module: nn.Module, backend: NativeLinear) -> GatedMLP | None:
    parts = _linears(module, "gate_proj", "up_proj", "down_proj")
    if parts is None:
        return None
    gate, up, down = parts
    if gate.bias is not None or gate.out_features % BLOCK or gate.in_features % 2:
        return None
    activation = _activation_of(module.act_fn)
    if activation is None or _has_hooks(gate, up):
        return None
    ours = GatedMLP(backend.pack_gated(gate.weight, up.weight, activation), down)
    x = _random(PROBE_TOKENS, gate.in_features)
    with _without_hooks(down):  # the other ranks are not at this layer
        if not agree(ours(x), module(x)):
            raise _Differs
    return ours


def _activation_of(function: Any) -> str | None:
    x = torch.linspace(-6, 6, 97)
    expected = function(x)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(known(x), expected, rtol=1e-4, atol=1e-5):
            return name
    return None


# Attention


class FusedAttention(nn.Module):
    """Attention with rotary embedding, its projections and norms in two calls.

    Args:
        kernels: for norms and rotary embedding.
        qkv: the three projections, one after the other.
        out: the output projection.
        num_kv_heads: of this rank.
        head_dim: of each head.
        norms: of query and key heads, or None.
        layer_idx: whose KV cache.
        call: scale, window and the rest, as the original gave them to the back end.
    """

    def __init__(
        self,
        kernels: Kernels,
        qkv: PackedLinear,
        out: nn.Module,
        num_kv_heads: int,
        head_dim: int,
        norms: tuple[RMSNorm, RMSNorm] | None,
        layer_idx: int,
        call: AttentionCall,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = qkv, out
        self._kernels = kernels
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self._num_heads = qkv.out_features // head_dim - 2 * num_kv_heads
        self.layer_idx, self._call = layer_idx, call
        self._factors = (norms[0].factors, norms[1].factors) if norms else None
        self._eps = norms[0].eps if norms else 0.0
        self._rounds_first = norms[0].rounds_first if norms else False

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """transformers' interface; `[1, T, hidden]` in and out."""
        assert attention_mask is None, "masks are ours: see BatchLayout"
        qkv_THD = self.qkv_proj(hidden_states)[0].view(hidden_states.shape[1], -1, self.head_dim)
        cos, sin = (x[0].contiguous() for x in position_embeddings)
        self._kernels.norm_and_rotate(
            *(qkv_THD, self._factors, (cos, sin), self.num_kv_heads),
            *(self._eps, self._rounds_first),
        )
        query_THD, key_TKD, value_TKD = qkv_THD.split(
            [self._num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        context = current()
        kv = context.kv_cache[self.layer_idx]
        self._kernels.write_kv(kv, key_TKD, value_TKD, context.layout.slot_mapping)
        out_THD = context.backend.forward(self._call, query_THD, kv)
        return self.o_proj(out_THD.flatten(1)[None]), None


def _attention(module: nn.Module, backend: NativeLinear) -> FusedAttention | None:
    projections = _linears(module, "q_proj", "k_proj", "v_proj", "o_proj")
    head_dim: int | None = getattr(module, "head_dim", None)
    if head_dim is None or projections is None:
        return None
    query, key, value, out = projections
    if head_dim % (2 * BLOCK) or query.in_features % 2 or _has_hooks(query, key, value):
        return None
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    has_norms = norms != [None, None]
    if has_norms and not all(_is_norm(norm, head_dim) for norm in norms):
        return None
    num_kv_heads, layer_idx = key.out_features // head_dim, int(module.layer_idx)  # type: ignore[arg-type]
    probe = _AttentionProbe(layer_idx, query.in_features, num_kv_heads, head_dim)
    with _without_hooks(out):
        theirs = probe.run(module)
        has_bias = query.bias is not None
        qkv = backend.pack(
            torch.cat([part.weight for part in (query, key, value)]),
            torch.cat([part.bias for part in (query, key, value)]) if has_bias else None,
        )
        ours = FusedAttention(
            backend.kernels,
            qkv,
            out,
            num_kv_heads,
            head_dim,
            tuple(norms) if has_norms else None,  # type: ignore[arg-type]
            layer_idx,
            probe.recorder.call,
        )
        if not all(map(agree, probe.run(ours), theirs)):
            raise _Differs
    return ours


def _is_norm(norm: object, head_dim: int) -> bool:
    return isinstance(norm, RMSNorm) and len(norm.factors) == head_dim


def _linears(module: nn.Module, *names: str) -> list[nn.Linear] | None:
    """A module's parts of these names, if each is a linear layer and nothing else."""
    parts = [getattr(module, name, None) for name in names]
    found = [part for part in parts if type(part) is nn.Linear]
    return found if len(found) == len(names) else None


class _Recorder:
    """An `AttentionBackend` that keeps what it was asked, and answers with the query."""

    name = "probe"
    block_size = PROBE_TOKENS
    call: AttentionCall
    query_THD: Tensor

    def prepare(self, layout: BatchLayout) -> None:
        """Nothing is shared."""

    def forward(self, call: AttentionCall, query_THD: Tensor, kv: LayerKV) -> Tensor:
        self.call, self.query_THD = call, query_THD.clone()
        return self.query_THD


class _AttentionProbe:
    """One request of some tokens, at random positions."""

    def __init__(self, layer_idx: int, hidden_size: int, num_kv_heads: int, head_dim: int) -> None:
        count = PROBE_TOKENS
        self.recorder = _Recorder()
        self._layer_idx = layer_idx
        self._kv_shape = (1, count, num_kv_heads, head_dim)
        self._hidden = _random(1, count, hidden_size)
        angles = 3 * _random(1, count, head_dim // 2).float()
        angles = torch.cat([angles, angles], dim=-1)
        self._rotary = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        self._layout = BatchLayout(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=torch.arange(count),
            query_start_cpu=np.array([0, count]),
            seq_lens_cpu=np.array([count]),
            max_query_len=count,
            max_seq_len=count,
            block_size=count,
        )

    def run(self, module: nn.Module) -> list[Tensor]:
        """Return query, key, value and output of one pass."""
        kv = LayerKV(*(torch.zeros(self._kv_shape, dtype=torch.bfloat16) for _ in range(2)))
        context = ForwardContext(self._layout, {self._layer_idx: kv}, self.recorder)
        with forward_context(context):
            output = module(self._hidden, position_embeddings=self._rotary, attention_mask=None)
        output = output[0] if isinstance(output, tuple) else output
        return [self.recorder.query_THD.flatten(1), kv.key.flatten(2), kv.value.flatten(2), output]


# Layers


class FusedLayer(nn.Module):
    """A layer of attention and MLP around a residual, with or without norms before its sums.

    Args:
        kernels: for sums and norms.
        attention: replaced already, as are the norms and the MLP.
        mlp: of the layer.
        norms: before attention, after it (or None), before the MLP, after it (or None).
    """

    def __init__(
        self,
        kernels: Kernels,
        attention: FusedAttention,
        mlp: GatedMLP,
        norms: tuple[RMSNorm, RMSNorm | None, RMSNorm, RMSNorm | None],
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = attention, mlp, norms[0]
        self._kernels = kernels
        self._factors = [None if norm is None else norm.factors for norm in norms[1:]]
        self._eps, self._rounds_first = norms[0].eps, norms[0].rounds_first

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **unused: object,
    ) -> Tensor:
        """transformers' interface; `[1, T, hidden]` in and out."""
        post_attention, pre_mlp, post_mlp = self._factors
        how = self._eps, self._rounds_first
        x, _ = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, attention_mask
        )
        total, x = self._kernels.add_and_norm(x, hidden_states, post_attention, pre_mlp, *how)
        total, _ = self._kernels.add_and_norm(self.mlp(x), total, post_mlp, None, *how)
        return total


def _layer(module: nn.Module, backend: NativeLinear) -> FusedLayer | None:
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, GatedMLP):
        return None
    norms = [getattr(module, f"{name}_layernorm", None) for name in _LAYER_NORMS]
    before, after_attention, before_mlp, after_mlp = norms
    if before_mlp is None:  # Llama calls the one before the MLP by what it comes after
        after_attention, before_mlp = None, after_attention
    found = [norm for norm in norms if norm is not None]
    if not all(isinstance(norm, RMSNorm) for norm in found):
        return None
    if before is None or before_mlp is None or len({(n.eps, n.rounds_first) for n in found}) > 1:
        return None
    norms_in_order = (before, after_attention, before_mlp, after_mlp)
    ours = FusedLayer(backend.kernels, attention, mlp, norms_in_order)
    probe = _AttentionProbe(
        *(attention.layer_idx, attention.qkv_proj.in_features),
        *(attention.num_kv_heads, attention.head_dim),
    )
    with _without_hooks(attention.o_proj), _without_hooks(mlp.down_proj):
        if not all(map(agree, probe.run(ours), probe.run(module))):
            raise _Differs
    return ours


# Single layers


def _pack(name: str, linear: nn.Linear, backend: NativeLinear) -> PackedLinear | None:
    """Return the packed layer, or None where it must stay as it is."""
    if linear.in_features % 2 or linear.weight.dtype != torch.bfloat16:
        return None
    x = _random(PROBE_TOKENS, linear.in_features)
    expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
    out_dtype = torch.float32 if name == "lm_head" else torch.bfloat16
    packed = backend.pack(linear.weight.data, linear.bias, out_dtype)
    if agree(packed(x), expected):
        return packed
    logger.warning("linear %s left alone: packed, it computes something else", name)
    linear.weight = nn.Parameter(unpack(packed.packed)[: linear.out_features], requires_grad=False)
    return None


def _patch_tied_embedding(model: Any, backend: NativeLinear) -> int:
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
    with _without_hooks(embedding):
        expected = embedding(ids)
    packed = _pack(head_name, head, backend)
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
    _exchange(model, head_name, packed)
    _exchange(model, embedding_name, ours)
    return 1


def _has_hooks(*modules: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
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


def _return_freed_memory() -> None:
    """Give the memory of replaced weights back to the system: malloc keeps it otherwise, by our own
    setting (`resources`)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


_LAYER_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")

_RULES: dict[str, Rule] = {"norm": _norm, "mlp": _mlp, "attention": _attention, "layer": _layer}
"""In this order: attention takes over norms that have been replaced, a layer takes over all."""
