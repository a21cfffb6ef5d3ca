"""What the KV cache of an idle server takes."""

import subprocess
import sys

_ALLOCATE = """
import numpy as np, torch
from engine import lifecycle
from workers import kv_cache, resources

resources._keep_large_allocations()
used = [np.ones(16 << 20, np.uint8) for _ in range(8)]
del used
lifecycle.freeze_heap()
before = resources.resident_memory()
shape = kv_cache.KVShape(num_kv_heads=1, head_dim=64, dtype=torch.float32)
pages = kv_cache.allocate(shape, range(4), 1 << 12, 16, torch.device("cpu"))
assert sum(each.key.nbytes + each.value.nbytes for each in pages.values()) == 128 << 20
print(resources.resident_memory() - before)
pages[0].key[0] = 1.0
assert pages[0].key.sum() == 16 * 64
"""


def test_pages_occupy_nothing_until_they_are_written() -> None:
    """Also where the C library had memory there before, and gave it back."""
    done = subprocess.run(
        [sys.executable, "-c", _ALLOCATE], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 8 << 20
