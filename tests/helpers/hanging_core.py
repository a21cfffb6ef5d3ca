"""`python -m tests.helpers.hanging_core serve …`: the command, whose engine cores stop making
progress in the middle of a step. Their other threads live on, and so do their heartbeats.

Spawned children import the main module of their parent, so they are changed too.
"""

import time

from engine.core import EngineCore
from engine.step import ModelRunnerOutput, SchedulerOutput

HANGS_AT_STEP = 20

_update = EngineCore._update


def hang(self: EngineCore, plan: SchedulerOutput, reply: ModelRunnerOutput) -> None:
    while plan.step >= HANGS_AT_STEP:
        time.sleep(0.1)
    _update(self, plan, reply)


EngineCore._update = hang  # type: ignore[method-assign]

if __name__ == "__main__":
    from cluster.__main__ import main

    main()
