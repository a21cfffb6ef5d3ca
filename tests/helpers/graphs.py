"""What stands for CUDA graphs where there is no GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.causal_lm import CausalLM
from workers.cuda_graphs import CannotCapture, Recording
from workers.worker import Worker


class Again:
    """Instead of CUDA graphs: the same calls, each into the same memory. As graphs share theirs,
    what another one has left there is gone after a replay."""

    num_replays = 0

    def __init__(self) -> None:
        self._all_states: list[Tensor] = []

    def __call__(self, run: Callable[[], Tensor]) -> Recording:
        states = torch.empty_like(run())
        self._all_states.append(states)

        def replay() -> None:
            Again.num_replays += 1
            found = run()
            for each in self._all_states:
                each.fill_(torch.nan)
            states.copy_(found)

        return Recording(states, replay)


class Refuses(Again):
    """Captures two sizes, and of the third only what comes before a capture."""

    def __call__(self, run: Callable[[], Tensor]) -> Recording:
        if len(self._all_states) == 2:
            run()
            raise CannotCapture("operation not permitted when stream is capturing")
        return super().__call__(run)


def capture(worker: Worker, refusing_rank: int | None = None) -> None:
    """Let a loaded worker capture its decodes, or try to."""
    assert isinstance(worker._model, CausalLM)
    worker._graphs = worker._model.graphs
    worker._graphs._recorder = Refuses if worker._rank == refusing_rank else Again
