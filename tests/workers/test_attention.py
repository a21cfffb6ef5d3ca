"""Attention back ends against the reference, and the reference against the textbook."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.errors import ConfigError
from tests.helpers import built_kernels
from workers import kv_cache
from workers.attention import cpu, reference, select
from workers.attention.base import AttentionBackend, AttentionCall
from workers.attention.cpu import CpuAttention
from workers.attention.native import NativeAttention
from workers.attention.reference import ReferenceAttention
from workers.forward_context import BatchLayout, ForwardContext, forward_context
from workers.kv_cache import KVShape, LayerKV

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 200


@dataclass
class Batch:
    """Requests with random queries over a random cache."""

    layout: BatchLayout
    query_THD: Tensor
    kv: LayerKV


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
) -> Batch:
    """Return requests that have `seq_lens` tokens, the last `query_lens` of which are queries."""
    random = torch.Generator().manual_seed(5)
    num_blocks = [-(-n // BLOCK_SIZE) for n in seq_lens]
    table = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    free = iter(torch.randperm(NUM_BLOCKS, generator=random).tolist())
    for row, count in enumerate(num_blocks):
        table[row, :count] = torch.tensor(list(itertools.islice(free, count)))
    query_start = np.concatenate([[0], np.cumsum(query_lens)])
    rows = np.repeat(np.arange(len(seq_lens)), query_lens)
    positions = np.concatenate(
        [np.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
    )
    layout = BatchLayout(
        query_start=torch.from_numpy(query_start.astype(np.int32)),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.from_numpy(
            kv_cache.slot_mapping(table.numpy(), rows, positions, BLOCK_SIZE)
        ),
        query_start_cpu=query_start,
        seq_lens_cpu=np.array(seq_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=BLOCK_SIZE,
    )
    size = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    return Batch(
        layout,
        torch.randn(sum(query_lens), num_heads, head_dim, generator=random).to(dtype),
        LayerKV(*(torch.randn(size, generator=random).to(dtype) for _ in range(2))),
    )


MIXED = ([1, 5, 1, 12, 1, 3, 1], [9, 5, 30, 12, 1, 20, 17])
"""Decodes and prefills, some of them from the start and some with tokens in the cache."""


@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 100])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_cpu_equals_reference(num_kv_heads: int, window: int | None) -> None:
    """In mixed batches, with shared KV heads and with windows."""
    batch = make_batch(*MIXED, num_kv_heads=num_kv_heads)
    call = AttentionCall(scale=0.3, window=window)
    torch.testing.assert_close(
        run(CpuAttention(), call, batch), run(ReferenceAttention(), call, batch)
    )


def run(backend: AttentionBackend, call: AttentionCall, batch: Batch) -> Tensor:
    backend.prepare(batch.layout)
    return backend.forward(call, batch.query_THD, batch.kv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_works_in_half_precision(dtype: torch.dtype) -> None:
    """Two bytes a number: the result is the reference's, rounded."""
    batch = make_batch(*MIXED, dtype=dtype)
    call = AttentionCall(scale=0.3, window=6)
    got, expected = run(CpuAttention(), call, batch), run(ReferenceAttention(), call, batch)
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)


def test_large_decode_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many long requests are gathered in several batches, and none is lost or swapped."""
    monkeypatch.setattr(cpu, "GATHER_BYTES", 4096)
    batch = make_batch([1] * 12, [3, 40, 17, 8, 25, 1, 33, 12, 40, 5, 21, 30])
    backend = CpuAttention()
    call = AttentionCall(scale=0.3)
    torch.testing.assert_close(run(backend, call, batch), run(ReferenceAttention(), call, batch))
    decodes = backend._work[None].decodes
    assert len(decodes) > 3
    assert sorted(torch.cat([d.tokens for d in decodes]).tolist()) == list(range(12))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A few requests, of one token to several tiles, with one query to all of them."""
    seq_lens = draw(st.lists(st.integers(1, 190), min_size=1, max_size=4))
    few_or_many = st.one_of(st.integers(1, 4), st.integers(1, 190))
    query_lens = [min(draw(few_or_many), seq_len) for seq_len in seq_lens]
    num_kv_heads = draw(st.sampled_from([1, 2]))
    num_heads = num_kv_heads * draw(st.integers(1, 5))
    head_dim = draw(st.sampled_from([16, 48, 64, 96]))
    return make_batch(query_lens, seq_lens, num_heads, num_kv_heads, torch.bfloat16, head_dim)


@pytest.mark.hypothesis
@pytest.mark.parametrize("arithmetic", built_kernels.ARITHMETICS)
def test_native_equals_reference(arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random batches and all that a call can ask for, within the rounding of the result and, under
    the dot, of the weights."""
    kernels = built_kernels.backend().kernels
    built_kernels.use_arithmetic(monkeypatch, arithmetic)

    @given(
        batch=batches(),
        window=st.one_of(st.none(), st.integers(1, 200)),
        softcap=st.sampled_from([None, 2.0]),
        has_sinks=st.booleans(),
    )
    @settings(max_examples=60)
    def check(batch: Batch, window: int | None, softcap: float | None, has_sinks: bool) -> None:
        sinks = torch.linspace(-1, 3, batch.query_THD.shape[1]) if has_sinks else None
        call = AttentionCall(scale=0.2, window=window, softcap=softcap, sinks=sinks)
        got = run(NativeAttention(kernels), call, batch)
        expected = run(ReferenceAttention(), call, batch)
        torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)

    check()


def test_native_reads_queries_where_they_lie() -> None:
    """A slice of the joint projection's output, and heads that lie otherwise."""
    batch = make_batch(*MIXED, dtype=torch.bfloat16)
    backend, call = NativeAttention(built_kernels.backend().kernels), AttentionCall(scale=0.3)
    expected = run(backend, call, batch)
    joint = torch.cat([batch.query_THD, batch.query_THD], dim=1)[:, :4]
    transposed = batch.query_THD.transpose(0, 1).contiguous().transpose(0, 1)
    for query in (joint, transposed):
        assert torch.equal(backend.forward(call, query, batch.kv), expected)


@pytest.mark.parametrize("name", ["cpu", "native", "reference"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_what_an_earlier_owner_left_in_a_page_does_not_spread(
    left: float, window: int | None, name: str
) -> None:
    """Pages are reused as they are, and one request's overflow must not reach the next."""
    if name == "native":
        backend: AttentionBackend = NativeAttention(built_kernels.backend().kernels)
        batch = make_batch(*MIXED, dtype=torch.bfloat16)
    else:
        backend = CpuAttention() if name == "cpu" else ReferenceAttention()
        batch = make_batch(*MIXED)
    call = AttentionCall(scale=0.3, window=window)
    expected = run(backend, call, batch)
    owned = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    for block_ids, seq_len in zip(batch.layout.block_table, batch.layout.seq_lens, strict=True):
        slots = block_ids[:, None].long() * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        owned[slots.flatten()[:seq_len]] = True
    for pages in batch.kv:
        pages.flatten(0, 1)[~owned] = left
    assert torch.equal(run(backend, call, batch), expected)


def test_masks_are_made_once_for_all_layers() -> None:
    """As numbers of the cache's type: torch would convert any others in every layer."""
    batch = make_batch([5, 1], [9, 7], dtype=torch.bfloat16)
    backend, call = CpuAttention(), AttentionCall(scale=0.3)
    run(backend, call, batch)
    work = backend._work[None]
    masks = [work.decodes[0].mask, work.prefills[0].mask]
    assert [mask is not None and mask.dtype for mask in masks] == [torch.bfloat16] * 2
    backend.forward(call, batch.query_THD, batch.kv)
    assert backend._work[None] is work


def test_window_gathers_only_what_it_sees() -> None:
    """A long request in a layer with a window costs the window, not its length."""
    batch = make_batch([1], [400])
    backend = CpuAttention()
    run(backend, AttentionCall(scale=0.3, window=8), batch)
    assert backend._work[8].decodes[0].block_ids.shape[1] <= 8 // BLOCK_SIZE + 1


@pytest.mark.parametrize(
    "call",
    [
        AttentionCall(scale=0.3, softcap=0.5),
        AttentionCall(scale=0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), window=5),
    ],
)
def test_softcap_and_sinks_are_honoured(call: AttentionCall) -> None:
    """The CPU back end does what the reference does, and not what it does without them."""
    batch = make_batch(*MIXED)
    plain = AttentionCall(scale=0.3, window=call.window)
    got = run(CpuAttention(), call, batch)
    torch.testing.assert_close(got, run(ReferenceAttention(), call, batch))
    assert not torch.allclose(got, run(ReferenceAttention(), plain, batch), atol=1e-3)


def test_reference_is_the_textbook_formula() -> None:
    """Head by head and query by query, as on paper, with window, softcap and sinks."""
    batch = make_batch([6], [11])
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    call = AttentionCall(scale=0.7, window=4, softcap=1.5, sinks=sinks)
    table = batch.layout.block_table[0].long()
    keys, values = (t[table].flatten(0, 1)[:11] for t in batch.kv)
    expected = torch.zeros(6, 4, 16)
    for t, head in itertools.product(range(6), range(4)):
        seen = range(max(0, 5 + t - 3), 5 + t + 1)
        scores = [float(batch.query_THD[t, head] @ keys[s, head // 2]) * 0.7 for s in seen]
        weights = [np.exp(1.5 * np.tanh(score / 1.5)) for score in scores]
        total = sum(weights) + np.exp(float(sinks[head]))
        for weight, s in zip(weights, seen, strict=True):
            expected[t, head] += weight / total * values[s, head // 2]
    torch.testing.assert_close(run(ReferenceAttention(), call, batch), expected)


class Layer(nn.Module):
    """What transformers hands to an attention function, as far as it matters."""

    layer_idx = 3
    sliding_window: int | None = None
    is_causal = True


@pytest.fixture
def batch() -> Iterator[Batch]:
    """A batch whose forward pass is under way, on layer 3."""
    batch = make_batch(*MIXED)
    backend = ReferenceAttention()
    backend.prepare(batch.layout)
    with forward_context(ForwardContext(batch.layout, {3: batch.kv}, backend)):
        yield batch


def attend(layer: Layer, batch: Batch, **wishes: object) -> Tensor:
    key = torch.ones(1, 2, len(batch.query_THD), 16)
    query = batch.query_THD.transpose(0, 1)[None]
    out, _ = select._attend(layer, query, key, 2 * key, None, **wishes)  # type: ignore[arg-type]
    return out[0]


def test_keys_and_values_are_stored_in_their_slots(batch: Batch) -> None:
    """Of the layer that calls, at the slots of this step's tokens."""
    attend(Layer(), batch)
    slots = batch.layout.slot_mapping
    assert (batch.kv.key.flatten(0, 1)[slots] == 1).all()
    assert (batch.kv.value.flatten(0, 1)[slots] == 2).all()


def test_window_comes_from_the_call_or_the_layer(batch: Batch) -> None:
    """Some models pass it, some only have it on the module; without scaling it is 1/√D."""
    layer = Layer()
    layer.sliding_window = 4
    on_layer = attend(layer, batch)
    passed = attend(Layer(), batch, sliding_window=4, scaling=0.25)
    torch.testing.assert_close(on_layer, passed)
    assert not torch.allclose(on_layer, attend(Layer(), batch))


def test_attention_that_looks_ahead_is_refused(batch: Batch) -> None:
    """Whether the call or the layer says so."""
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(ConfigError, match="only causal models are served"):
        attend(layer, batch)
    with pytest.raises(ConfigError, match="only causal models are served"):
        attend(Layer(), batch, is_causal=False)


@pytest.mark.parametrize("name", ["varlen", "flash"])
def test_a_backend_that_does_not_run_here_is_refused(name: str) -> None:
    """The line names those there are."""
    with pytest.raises(ConfigError, match=f"{name} does not exist on cpu: there are reference, "):
        select.select_backend(name, CPU)


def test_cpu_backend_is_the_default_on_cpu() -> None:
    """Nobody has to choose."""
    assert select.select_backend(None, CPU).name == "cpu"
    assert select.select_backend("reference", CPU).name == "reference"


def test_varlen_refuses_what_its_kernel_cannot_do() -> None:
    """Rather than leaving softcap or sinks out. (That it computes right needs a GPU: tests/gpu.)"""
    from workers.attention import varlen  # needs a torch that has the kernel

    batch = make_batch([1], [4], dtype=torch.bfloat16)
    backend = varlen.VarlenAttention()
    assert backend.block_size % 256 == 0
    backend.prepare(batch.layout)
    with pytest.raises(ConfigError, match="neither softcap nor sinks"):
        backend.forward(AttentionCall(scale=1.0, softcap=1.0), batch.query_THD, batch.kv)
    with pytest.raises(ConfigError, match="float16 or bfloat16"):
        backend.forward(AttentionCall(scale=1.0), batch.query_THD.float(), batch.kv)


def test_cache_pages_are_zero_and_of_the_right_shape() -> None:
    """One pair of page tensors for each layer of the stage, counted in bytes as they are."""
    shape = KVShape(num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    pages = kv_cache.allocate(shape, range(3, 5), 7, BLOCK_SIZE, CPU)
    assert list(pages) == [3, 4]
    key, value = pages[3]
    assert key.shape == value.shape == (7, BLOCK_SIZE, 2, 16)
    assert not key.any()
    assert key.nbytes + value.nbytes == 7 * BLOCK_SIZE * shape.bytes_per_token


def test_visible_tokens() -> None:
    """The last 2 of 4 tokens see what came before them, and themselves."""
    assert reference.visible(2, 4, None, CPU).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]
    assert reference.visible(2, 4, 2, CPU).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]
