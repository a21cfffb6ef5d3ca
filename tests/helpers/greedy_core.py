"""`python -m tests.helpers.greedy_core serve …`: the command, in the memory control group that
MEMORY_CGROUP names, whose engine cores take more and more memory from a step on.

Spawned children import the main module of their parent, so they are changed too.
"""

import os
from pathlib import Path

from engine.core import EngineCore
from engine.step import ModelRunnerOutput, SchedulerOutput

TAKES_FROM_STEP = 20
MIB_A_STEP = 64

_update = EngineCore._update
_taken: list[bytes] = []


def take(self: EngineCore, plan: SchedulerOutput, reply: ModelRunnerOutput) -> None:
    if plan.step >= TAKES_FROM_STEP:
        _taken.append(os.urandom(1) * (MIB_A_STEP << 20))
    _update(self, plan, reply)


EngineCore._update = take  # type: ignore[method-assign]

if __name__ == "__main__":
    Path(os.environ["MEMORY_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    from cluster.__main__ import main

    main()
