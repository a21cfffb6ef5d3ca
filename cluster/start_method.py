"""How engine cores start: fork or spawn. Pure but for `observe`, which looks at this process.

The command spawns: by then it has an event loop, threads and ZeroMQ. In a user's script (the `LLM`
class) forking is faster and needs no `__main__` guard, but a forked child cannot use CUDA that its
parent has initialised, and inherits locks that other threads held at that moment, locked for ever.
"""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.environment import StartMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What decides, as far as it can be seen in this process."""

    is_fork_usual: bool = True
    """False on macOS, whose own libraries do not survive a fork."""

    is_cuda_initialized: bool = False
    other_threads: Sequence[str] = ()


def observe() -> Circumstances:
    """Look at this process. Imports nothing: torch is asked only if the user's script loaded it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    this = threading.current_thread()
    return Circumstances(
        is_fork_usual=sys.platform == "linux",
        is_cuda_initialized=bool(cuda is not None and cuda.is_initialized()),
        other_threads=[t.name for t in threading.enumerate() if t is not this],
    )


def choose(seen: Circumstances, requested: StartMethod | None) -> tuple[StartMethod, str | None]:
    """Return the method for the `LLM` class, and a warning if it is not what users expect.

    Args:
        seen: the circumstances.
        requested: `RAYWIRE_WORKER_MULTIPROC_METHOD`; it decides where set.
    """
    if requested is not None:
        return requested, None
    if not seen.is_fork_usual:
        return "spawn", None
    reason = None
    if seen.is_cuda_initialized:
        reason = "CUDA is initialised in this process"
    elif seen.other_threads:
        reason = f"other threads run in this process ({', '.join(seen.other_threads)})"
    if reason is None:
        return "fork", None
    return "spawn", (
        f"{reason}, so the engine is spawned instead of forked: the script is imported again in"
        " each child, and must create its LLM under `if __name__ == '__main__':`"
    )
