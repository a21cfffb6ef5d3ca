"""Our attention kernel over pages of any size and contexts of any length, cut and batched at will.

`test_attention.py` has the kernel's arithmetic and what a call can ask for; here is what depends on
where the tokens lie and on whom they share a step with.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import built_kernels
from workers.attention.base import AttentionCall
from workers.attention.native import NativeAttention
from workers.attention.reference import ReferenceAttention
from workers.forward_context import BatchLayout
from workers.kv_cache import LayerKV

BF16 = torch.bfloat16
HEAD_DIM = 32
FAR_APART = [1, 500, 513, 1030, 70]
"""Contexts around the lengths at which a decode's work is cut."""


def layout_of(
    query_lens: list[int], seq_lens: list[int], table: Tensor, block_size: int
) -> BatchLayout:
    query_start = np.concatenate([[0], np.cumsum(query_lens)])
    return BatchLayout(
        query_start=torch.from_numpy(query_start.astype(np.int32)),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(0, dtype=torch.int64),  # all keys are in the cache
        query_start_cpu=query_start,
        seq_lens_cpu=np.array(seq_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size,
    )


def shuffled_pages(
    seq_lens: list[int], block_size: int, num_kv_heads: int
) -> tuple[Tensor, LayerKV]:
    """Return block tables and pages. What no request has written is NaN."""
    random = torch.Generator().manual_seed(3)
    counts = [-(-n // block_size) for n in seq_lens]
    free = iter(torch.randperm(sum(counts), generator=random).tolist())
    table = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
    is_written = torch.zeros(sum(counts) * block_size, dtype=torch.bool)
    for row, (count, seq_len) in enumerate(zip(counts, seq_lens, strict=True)):
        table[row, :count] = torch.tensor(list(itertools.islice(free, count)))
        slots = table[row, :count, None] * block_size + torch.arange(block_size)
        is_written[slots.flatten()[:seq_len]] = True
    size = (sum(counts), block_size, num_kv_heads, HEAD_DIM)
    kv = LayerKV(*(torch.randn(size, generator=random).to(BF16) for _ in range(2)))
    for pages in kv:
        pages.flatten(0, 1)[~is_written] = float("nan")
    return table, kv


def queries(count: int, num_heads: int) -> Tensor:
    random = torch.Generator().manual_seed(4)
    return torch.randn(count, num_heads, HEAD_DIM, generator=random).to(BF16)


def native(num_threads: int = 2) -> NativeAttention:
    return NativeAttention(built_kernels.backend(num_threads).kernels)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Queries and tokens of a few requests: decodes, chunks of a prompt, and whole prompts."""
    lengths = st.one_of(st.integers(1, 70), st.sampled_from([512, 513, 700, 1030]))
    seq_lens = draw(st.lists(lengths, min_size=1, max_size=4))
    counts = st.one_of(st.integers(1, 4), st.integers(1, 150))
    return [(min(draw(counts), seq_len), seq_len) for seq_len in seq_lens]


@given(
    requests=requests(),
    block_size=st.sampled_from([1, 3, 16, 64, 256]),
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 9),
    window=st.one_of(st.none(), st.integers(1, 600)),
)
@settings(max_examples=15)
def test_pages_may_be_of_any_size_and_lie_anywhere(
    requests: list[tuple[int, int]],
    block_size: int,
    num_kv_heads: int,
    group: int,
    window: int | None,
) -> None:
    """Short contexts and those whose work is cut, over pages of 1 to 256 tokens; nothing of what
    lies behind the last token gets in."""
    query_lens, seq_lens = (list(column) for column in zip(*requests, strict=True))
    table, kv = shuffled_pages(seq_lens, block_size, num_kv_heads)
    layout = layout_of(query_lens, seq_lens, table, block_size)
    query = queries(sum(query_lens), num_kv_heads * group)
    call = AttentionCall(scale=0.2, window=window)
    ours, exact = native(), ReferenceAttention()
    ours.prepare(layout)
    exact.prepare(layout)
    torch.testing.assert_close(
        ours.forward(call, query, kv), exact.forward(call, query, kv), atol=0.02, rtol=0.02
    )


@pytest.mark.parametrize("window", [None, 600])
def test_a_request_does_not_depend_on_its_neighbours(window: int | None) -> None:
    """Alone on one thread, or beside others on three: the same bits."""
    query_lens = [1, 1, 1, 1, 40]
    table, kv = shuffled_pages(FAR_APART, 16, 2)
    query = queries(sum(query_lens), 6)
    call = AttentionCall(scale=0.2, window=window)
    shared, alone = native(3), native(1)
    shared.prepare(layout_of(query_lens, FAR_APART, table, 16))
    together = shared.forward(call, query, kv)
    ends = list(itertools.accumulate(query_lens))
    for row, (count, end) in enumerate(zip(query_lens, ends, strict=True)):
        alone.prepare(layout_of([count], [FAR_APART[row]], table[row : row + 1], 16))
        one = alone.forward(call, query[end - count : end], kv)
        assert torch.equal(one, together[end - count : end])


def test_steps_of_different_length_follow_each_other() -> None:
    """Memory kept from a long step does not show in a short one, nor the other way round."""
    table, kv = shuffled_pages(FAR_APART, 16, 2)
    query, call, ours = queries(5, 4), AttentionCall(scale=0.2), native()
    layouts = [layout_of([1] * n, FAR_APART[-n:], table[-n:], 16) for n in (1, 5, 2, 5, 1)]
    results = []
    for layout in layouts:
        ours.prepare(layout)
        results.append(ours.forward(call, query[: len(layout.seq_lens)], kv))
    assert torch.equal(results[0], results[4])
    assert torch.equal(results[1], results[3])
