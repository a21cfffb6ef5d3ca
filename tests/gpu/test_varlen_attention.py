"""The CUDA back end against the reference. Where there is no GPU, it is unproved."""

import numpy as np
import pytest
import torch

from workers import kv_cache
from workers.attention.base import AttentionCall
from workers.attention.reference import ReferenceAttention
from workers.forward_context import BatchLayout
from workers.kv_cache import LayerKV

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUERY_LENS = [1, 5, 1, 300, 1]
SEQ_LENS = [700, 5, 30, 400, 1]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("block_size", [16, 256])
def test_varlen_equals_reference(block_size: int, window: int | None) -> None:
    """In a mixed batch with grouped heads, in bfloat16. Proves page size, window and block table of
    torch's kernel on this GPU."""
    from workers.attention.varlen import VarlenAttention

    device = torch.device("cuda")
    torch.manual_seed(0)
    layout = _layout(block_size, device)
    query = torch.randn(sum(QUERY_LENS), 8, 64, device=device, dtype=torch.bfloat16)
    size = (256, block_size, 2, 64)
    kv = LayerKV(*(torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2)))
    call = AttentionCall(scale=0.125, window=window)

    outputs = []
    for backend in (VarlenAttention(), ReferenceAttention()):
        backend.prepare(layout)
        outputs.append(backend.forward(call, query, kv))
    torch.testing.assert_close(outputs[0], outputs[1], atol=0.02, rtol=0.02)


def _layout(block_size: int, device: torch.device) -> BatchLayout:
    max_blocks = -(-max(SEQ_LENS) // block_size)
    table = torch.randperm(256)[: len(SEQ_LENS) * max_blocks].view(len(SEQ_LENS), -1).int()
    query_start = np.concatenate([[0], np.cumsum(QUERY_LENS)])
    rows = np.repeat(np.arange(len(SEQ_LENS)), QUERY_LENS)
    positions = np.concatenate(
        [np.arange(s - q, s) for q, s in zip(QUERY_LENS, SEQ_LENS, strict=True)]
    )
    slots = kv_cache.slot_mapping(table.numpy(), rows, positions, block_size)
    return BatchLayout(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        query_start_cpu=query_start,
        seq_lens_cpu=np.array(SEQ_LENS),
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
        block_size=block_size,
    )
