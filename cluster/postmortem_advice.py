"""From the first cause of an end to what an operator can do about it. Pure; for `postmortem`."""

import re
from collections.abc import Sequence

_ADVICE = (
    (
        r"out of memory",
        "The kernel has probably killed it for want of memory: give the container or machine more,"
        " or take less: --kv-cache-memory-bytes, --max-num-seqs, fewer ranks on this node.",
    ),
    (
        r"No space left|Errno 28|killed by SIGBUS|Bus error",
        "Shared memory, or the disk under the model, has been full or taken away: see what"
        " /dev/shm holds (`df -h /dev/shm`), give the container a larger one, or set"
        " RAYWIRE_MQ_MAX_CHUNK_BYTES_MB lower.",
    ),
    (
        r"killed by SIGKILL|it was killed",
        "Somebody has sent SIGKILL: a container runtime whose patience or limit was exceeded, an"
        " operator, a job's time limit. `kubectl describe pod`, `journalctl` and `dmesg` may know.",
    ),
    (
        r"killed by SIG(SEGV|ABRT|ILL|FPE|SYS|TRAP)",
        "It has crashed in native code. Its stacks, if there are any, say where; --linear-backend"
        " torch or another --attention-backend leaves that code out. Please report it.",
    ),
    (
        r"killed by SIG(TERM|INT|HUP|QUIT)",
        "Somebody has ended this one process. To stop a server, send SIGTERM to the command.",
    ),
    (
        r"hung: no heartbeat",
        "The engine core has stood still: stopped (SIGSTOP, a debugger, a frozen container), or"
        " starved of the processor. Its stacks, if there are any, say where; `raywire plan` says"
        " how many cores the processes want.",
    ),
    (
        r"hung: no progress|has no reply in",
        "A step took longer than RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS: a rank that hangs, whose"
        " stacks, if there are any, say where, or a step that is that long: then set it higher.",
    ),
    (
        r"its event loop has not turned",
        "An API server has stood still. Its stacks, if there are any, say where; more"
        " --api-server-count share the work.",
    ),
    (
        r"no READY within|no sign within|has not started all within|has no READY",
        "The start took longer than --startup-timeout: a slow disk or network under the model, or"
        " a rank that hangs while it loads. The last lines of who is missing say where it was.",
    ),
    (
        r"died: .*node|node .*(died|dead)",
        "Ray has lost the node: look at its raylet's log, and at the machine.",
    ),
    (
        r"failed in|failed: |Error: ",
        "This is an exception, whose traceback is in the log of the process that has failed. If no"
        " setting explains it, please report it with that.",
    ),
    (r"is gone", "The process that had started this one was killed; see who did that."),
    (r"", "The last lines below, and the log of the process named, say what it was doing."),
)
"""What a cause may say, and what follows from it. The first that fits counts."""


def advise(cause: str, with_stacks: Sequence[str] = ()) -> list[str]:
    """What to do about it, a sentence or two a line.

    Args:
        cause: the first.
        with_stacks: processes that have left the stacks of their threads.
    """
    lines = [next(advice for pattern, advice in _ADVICE if re.search(pattern, cause))]
    if with_stacks:
        lines.append(f"There are stacks of {', '.join(with_stacks)}.")
    return lines
