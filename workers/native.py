"""Our compiled kernels, called through ctypes; `native_build` makes and loads their library."""

import ctypes
import time
from ctypes import c_float, c_int, c_int64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.base import AttentionCall
from workers.forward_context import BatchLayout
from workers.kv_cache import LayerKV
from workers.token_choice import GROUP, Depth, Floats, Ints

_DOT, _FLOAT, _INT8, _MATRIX, _INT8_MATRIX = 0, 1, 2, 3, 4
_NAMES = {_DOT: "bf16-dot", _FLOAT: "float", _MATRIX: "bf16-matrix"}
_BLOCK = 16
_BINS = 4096
ACTIVATIONS = {"none": 0, "gelu_tanh": 1, "silu": 2}

_SIGNATURES = {
    "raywire_has_dot": (),
    "raywire_has_matrix": (),
    "raywire_pack": (c_void_p, c_int64, c_int64, c_int),
    "raywire_linear": (*[c_void_p] * 4, *[c_int64] * 5, *[c_int] * 4),
    "raywire_rows": (*[c_void_p] * 3, c_int64, c_int64, c_int),
    "raywire_int8_block_bytes": (c_int64,),
    "raywire_int8_pack": (*[c_void_p] * 2, c_int64, c_int64, c_int),
    "raywire_int8_rows": (*[c_void_p] * 3, c_int64, c_int64, c_int),
    "raywire_rms_norm": (*[c_void_p] * 3, c_int64, c_int64, c_float, c_int, c_int),
    "raywire_add_and_norm": (*[c_void_p] * 6, c_int64, c_int64, c_float, c_int, c_int),
    "raywire_norm_and_rotate": (*[c_void_p] * 5, *[c_int64] * 4, c_float, c_int, c_int),
    "raywire_write_kv": (c_void_p, c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_int64),
    "raywire_attention": (*[c_void_p] * 8, *[c_int64] * 8, c_float, c_float, c_int, c_int),
    "raywire_best_tokens": (*[c_void_p] * 3, c_int64, c_int64, c_int),
    "raywire_group_weights": (*[c_void_p] * 5, c_int64, c_int64, c_int),
    "raywire_find_cuts": (*[c_void_p] * 10, c_int64, c_int64, c_int),
    "raywire_tokens_above": (*[c_void_p] * 9, c_int64, c_int64, c_int),
    "raywire_mask_logits": (*[c_void_p] * 3, c_int64, c_int64, c_int),
    "raywire_layers_memory": (c_void_p,),
    "raywire_layers": (*[c_void_p] * 4, c_int, c_int),
}


class Kernels:
    """The kernels of one built library. Tensors are contiguous bfloat16 on the CPU, unless said.

    Args:
        library: loaded.
        num_threads: that share the work of a call.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        for name, arguments in _SIGNATURES.items():
            getattr(library, name).argtypes = arguments
        self._linear = library.raywire_linear
        self._pack = library.raywire_pack
        self._rows = library.raywire_rows
        self._int8_pack = library.raywire_int8_pack
        self._int8_rows = library.raywire_int8_rows
        self._int8_block_bytes = library.raywire_int8_block_bytes
        self._int8_block_bytes.restype = c_int64
        self._rms_norm = library.raywire_rms_norm
        self._add_and_norm = library.raywire_add_and_norm
        self._norm_and_rotate = library.raywire_norm_and_rotate
        self._write_kv = library.raywire_write_kv
        self._attention = library.raywire_attention
        self._best_tokens = library.raywire_best_tokens
        self._group_weights = library.raywire_group_weights
        self._find_cuts = library.raywire_find_cuts
        self._tokens_above = library.raywire_tokens_above
        self._mask_logits = library.raywire_mask_logits
        self._layers = library.raywire_layers
        self._layers_memory = library.raywire_layers_memory
        self._layers_memory.restype = c_int64
        self._num_threads = num_threads
        self._has_dot = bool(library.raywire_has_dot())
        self._has_matrix = bool(library.raywire_has_matrix())
        self._arithmetic = self._fastest_arithmetic()

    @property
    def arithmetic(self) -> str:
        return _NAMES[self._arithmetic]

    def pack(self, weight: Tensor) -> None:
        """Bring a weight `[outputs, inputs]`, a multiple of 16 and an even number, into the order
        that `linear` reads, in place."""
        self._pack(weight.data_ptr(), *weight.shape, self._num_threads)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        activation: int = ACTIVATIONS["none"],
    ) -> None:
        """Write `x @ weight.T + bias` into `out`, which may be float32.

        Args:
            x: `[…, inputs]`.
            weight: packed.
            bias: as long as the packed weight has rows, or None.
            out: `[…, outputs]`; with an activation, half as many as the weight has rows, which are
                gate and up in turns of 16.
            activation: one of `ACTIVATIONS`.
        """
        num_inputs, arithmetic = x.shape[-1], self._arithmetic
        if weight.dtype == torch.int8:
            arithmetic = _INT8_MATRIX if arithmetic == _MATRIX else _INT8
        self._linear(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.numel() // num_inputs,
            out.shape[-1] if activation == 0 else 2 * out.shape[-1],
            num_inputs,
            num_inputs,
            out.shape[-1],
            arithmetic,
            activation,
            out.dtype == torch.float32,
            self._num_threads,
        )

    def pack_int8(self, weight: Tensor) -> Tensor:
        """Return a packed weight as 8-bit integers, in their own order: `[blocks, bytes]`, int8.
        The memory of the weight is given back as it is read, so that nothing of it is left."""
        num_outputs, num_inputs = weight.shape
        shape = num_outputs // _BLOCK, self._int8_block_bytes(num_inputs)
        out = torch.empty(shape, dtype=torch.int8)
        self._int8_pack(
            *(weight.data_ptr(), out.data_ptr(), num_outputs, num_inputs, self._num_threads)
        )
        return out

    def rows(self, weight: Tensor, ids: Tensor, out: Tensor) -> None:
        """Write rows `ids` (int64) of a packed weight into `out`."""
        read = self._int8_rows if weight.dtype == torch.int8 else self._rows
        read(
            *(weight.data_ptr(), ids.data_ptr(), out.data_ptr(), ids.numel(), out.shape[-1]),
            self._num_threads,
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, out: Tensor, eps: float, rounds_first: bool
    ) -> None:
        """Normalise the last dimension, a multiple of 16.

        Args:
            x: to be normalised.
            weight: factors, float32.
            out: the result.
            eps: added to the mean square.
            rounds_first: before the weight is multiplied in, as Llama does and Gemma does not.
        """
        size = x.shape[-1]
        self._rms_norm(
            *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size),
            *(eps, rounds_first, self._num_threads),
        )

    def add_and_norm(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor | None,
        following: Tensor | None,
        eps: float,
        rounds_first: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return `residual + x`, and that normed.

        Args:
            x: normed first if `post` is given, and overwritten.
            residual: of the same shape.
            post: factors of the norm before the sum, float32, or None.
            following: factors of the norm after it, or None: then there is no second result, and
                the first is returned in its place.
            eps: see `rms_norm`.
            rounds_first: see `rms_norm`.
        """
        total = torch.empty_like(residual)
        out = total if following is None else torch.empty_like(residual)
        size = x.shape[-1]
        self._add_and_norm(
            *(x.data_ptr(), residual.data_ptr(), None if post is None else post.data_ptr()),
            *(total.data_ptr(), None if following is None else following.data_ptr()),
            *(out.data_ptr(), x.numel() // size, size, eps, rounds_first, self._num_threads),
        )
        return total, out

    def norm_and_rotate(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        rotary: tuple[Tensor, Tensor],
        num_kv_heads: int,
        eps: float,
        rounds_first: bool,
    ) -> None:
        """Norm query and key heads, then give them their position, in place.

        Args:
            qkv: `[tokens, heads + 2 · num_kv_heads, head_dim]`, head_dim a multiple of 32.
            norms: factors for queries and keys, float32; None where heads are not normed.
            rotary: cosine and sine, `[tokens, head_dim]` each.
            num_kv_heads: of keys, and of values.
            eps: see `rms_norm`.
            rounds_first: see `rms_norm`.
        """
        num_tokens, num_heads, head_dim = qkv.shape
        q_weight, k_weight = (n.data_ptr() for n in norms) if norms else (None, None)
        self._norm_and_rotate(
            *(qkv.data_ptr(), q_weight, k_weight, rotary[0].data_ptr(), rotary[1].data_ptr()),
            *(num_tokens, num_heads - 2 * num_kv_heads, num_kv_heads, head_dim),
            *(eps, rounds_first, self._num_threads),
        )

    def write_kv(self, kv: LayerKV, key_TKD: Tensor, value_TKD: Tensor, slots: Tensor) -> None:
        """Store keys and values in their slots (int64). Their tokens may lie apart, alike in both;
        what belongs to a token lies together."""
        self._write_kv(
            *(key_TKD.data_ptr(), value_TKD.data_ptr(), key_TKD.stride(0), slots.data_ptr()),
            *(kv.key.data_ptr(), kv.value.data_ptr(), len(key_TKD), key_TKD[0].numel()),
        )

    def attention(
        self,
        query_THD: Tensor,
        out_THD: Tensor,
        kv: LayerKV,
        layout: BatchLayout,
        call: AttentionCall,
    ) -> None:
        """Attention over pages, as `AttentionBackend.forward` has it.

        Args:
            query_THD: of each token the heads lie together, D a multiple of 16.
            out_THD: the result, contiguous.
            kv: this layer's pages.
            layout: whose tokens they are.
            call: all that it can ask for is honoured.
        """
        num_heads, head_dim = query_THD.shape[1:]
        block_size, num_kv_heads = kv.key.shape[1:3]
        sinks = None if call.sinks is None else call.sinks.float()
        self._attention(
            *(query_THD.data_ptr(), out_THD.data_ptr(), kv.key.data_ptr(), kv.value.data_ptr()),
            *(layout.block_table.data_ptr(), layout.query_start.data_ptr()),
            *(layout.seq_lens.data_ptr(), None if sinks is None else sinks.data_ptr()),
            *(len(layout.seq_lens), num_heads, num_kv_heads, head_dim, query_THD.stride(0)),
            *(block_size, layout.block_table.stride(0), call.window or 0),
            *(call.scale, call.softcap or 0.0, self._arithmetic, self._num_threads),
        )

    def best_tokens(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `token_choice.group_maxima` and `token_choice.argmax` return of logits,
        `[rows, vocab]` float32."""
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        maxima = torch.empty(num_rows, -(-vocab_size // GROUP))
        tokens = torch.empty(num_rows, dtype=torch.int64)
        self._best_tokens(
            *(logits.data_ptr(), maxima.data_ptr(), tokens.data_ptr(), num_rows, vocab_size),
            self._num_threads,
        )
        return maxima, tokens

    def group_weights(
        self, logits: Tensor, maxima: Tensor, rows: Ints, temperature: Floats
    ) -> Tensor:
        """Return what `token_choice.group_weights` returns, but for rounding."""
        best, scale = _best_and_scale(maxima, rows, temperature)
        num_rows, vocab_size = len(rows), logits.shape[1]
        weights = torch.empty(num_rows, maxima.shape[1], dtype=torch.float64)
        self._group_weights(
            *(logits.data_ptr(), rows.ctypes.data, best.ctypes.data, scale.ctypes.data),
            *(weights.data_ptr(), num_rows, vocab_size, self._num_threads),
        )
        return weights

    def tokens_above(
        self, logits: Tensor, maxima: Tensor, rows: Ints, temperature: Floats, depth: Depth
    ) -> list[tuple[NDArray[np.float32], Ints] | None]:
        """See `token_choice.RowScans`."""
        best, scale = _best_and_scale(maxima, rows, temperature)
        num_rows, vocab_size = len(rows), logits.shape[1]
        bin_sizes = np.empty((num_rows, _BINS), np.uint32)
        cuts, sizes = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
        inputs = (logits.data_ptr(), rows.ctypes.data, best.ctypes.data, scale.ctypes.data)
        shape = (num_rows, vocab_size, self._num_threads)
        self._find_cuts(
            *inputs,
            *(depth.weight.ctypes.data, depth.count.ctypes.data, depth.distance.ctypes.data),
            *(bin_sizes.ctypes.data, cuts.ctypes.data, sizes.ctypes.data, *shape),
        )
        ends = sizes.cumsum()
        begins = ends - sizes
        values, token_ids = np.empty(ends[-1], np.float32), np.empty(ends[-1], np.int64)
        self._tokens_above(
            *(*inputs, bin_sizes.ctypes.data, cuts.ctypes.data, begins.ctypes.data),
            *(values.ctypes.data, token_ids.ctypes.data, *shape),
        )
        return [
            (values[begin:end], token_ids[begin:end]) if begin < end else None
            for begin, end in zip(begins, ends, strict=True)
        ]

    def mask_logits(
        self, logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.uint32]
    ) -> None:
        """Do what `token_masks.apply` does to logits, `[rows, vocab]` float32."""
        self._mask_logits(
            *(logits.data_ptr(), rows.ctypes.data, masks.ctypes.data),
            *(len(rows), logits.shape[1], self._num_threads),
        )

    def layers_memory(self, stack: ctypes.Structure) -> int:
        """Return how many elements of memory `layers` wants for each token."""
        return int(self._layers_memory(ctypes.byref(stack)))

    def layers(
        self, stack: ctypes.Structure, step: ctypes.Structure, states: Tensor, memory: Tensor
    ) -> None:
        """Run a stack of decoder layers (`layer_stack.py`) over states `[tokens, hidden]`, in
        place."""
        self._layers(
            *(ctypes.byref(stack), ctypes.byref(step), states.data_ptr(), memory.data_ptr()),
            *(self._arithmetic, self._num_threads),
        )

    def _fastest_arithmetic(self) -> int:
        """Time what this processor has on a small layer: on some the dot is slower than floats."""
        if not self._has_dot:
            return _FLOAT
        weight = torch.zeros(1024, 512, dtype=torch.bfloat16)
        x, out = weight[:24], torch.empty(24, 1024, dtype=torch.bfloat16)
        took = dict.fromkeys((_DOT, _FLOAT, *[_MATRIX] * self._has_matrix), float("inf"))
        for _ in range(5):
            for self._arithmetic in took:
                began = time.thread_time()
                self.linear(x, weight, None, out)
                took[self._arithmetic] = min(took[self._arithmetic], time.thread_time() - began)
        return min(took, key=took.__getitem__)


def _best_and_scale(
    maxima: Tensor, rows: Ints, temperature: Floats
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    best = maxima.numpy()[rows].max(-1)
    with np.errstate(over="ignore"):
        return best, (1.0 / temperature).astype(np.float32)
