"""Foreign work on the machine, on purpose: what others would do beside us."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy_threads(count: int | None = None) -> Iterator[None]:
    """So many processes that compute for as long as the block; None is one for each core."""
    words = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(count or os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen(words))
            stack.callback(process.kill)
        yield
