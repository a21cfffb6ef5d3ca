"""Decodes on a GPU, captured once for each of some batch sizes, and replayed.

A decode is hundreds of small kernels, which the GPU runs faster than Python launches them. A CUDA
graph is the list of them, launched as one; it reads and writes the memory that it was captured
with. So the inputs of a step lie in the same place every time (`input_batch.py`), where the layout
is as wide as it can be: whole rows of the block table, and the longest request there may be.

A batch is padded to the next size by its last request again, which computes the same once more,
and writes the same keys and values to the same slot: no slot is set aside, no kernel knows of it.

Captured is what lies between two exchanges with other pipeline stages; the head and the sampler are
not. Tensor ranks capture the same steps in the same order, as their plans are the same.

NOTE: not proved on a GPU yet; `tests/gpu/test_cuda_graphs.py` does where there is one. Without one,
`tests/workers/test_cuda_graphs.py` proves that replays find all that they read, and what padding
does. A model that cannot be captured runs as it is, and the log says so.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.input_batch import Step

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Each is at most twice the one before, from 16 on half as much again: more of a step is not
padding."""

Forward = Callable[[Step, Tensor | None], Tensor]
"""From a step and, on later pipeline stages, the states received, to states."""


class Recording(NamedTuple):
    """What has been captured."""

    states: Tensor
    """Where the result is after a replay."""
    replay: Callable[[], object]


Record = Callable[[Callable[[], Tensor]], Recording]
"""Captures what a function does to the device's memory; it need not have been done by then."""


def sizes(most: int) -> list[int]:
    """Return the batch sizes to capture where no batch has more than `most` requests."""
    if most > _SIZES[-1]:
        return list(_SIZES)
    return [*_SIZES[: bisect_left(_SIZES, most)], most]


class CudaGraphs:
    """Runs a model's steps, those that lie in place as graphs.

    Args:
        forward: the part that is captured.
        record: captures.
    """

    def __init__(self, forward: Forward, record: Record | None = None) -> None:
        self._forward = forward
        self._record = record or _CudaRecorder()
        self._captured: dict[int, tuple[Recording, Tensor | None]] = {}
        self._can_capture = True

    def clear(self) -> None:
        """Forget all graphs: the memory that they read is another's from now on."""
        self._captured.clear()

    def run(self, step: Step, received: Tensor | None) -> Tensor:
        """Return the states of a step; they last until the next one of its size."""
        if not step.lies_in_place or not self._can_capture:
            return self._forward(step, received)
        if (captured := self._captured.get(step.num_tokens)) is None:
            if (captured := self._capture(step, received)) is None:
                return self._forward(step, received)
            self._captured[step.num_tokens] = captured
        recording, kept = captured
        if kept is not None and received is not None:
            kept.copy_(received)
        recording.replay()
        return recording.states

    def _capture(
        self, step: Step, received: Tensor | None
    ) -> tuple[Recording, Tensor | None] | None:
        kept = None if received is None else received.clone()
        try:
            return self._record(lambda: self._forward(step, kept)), kept
        except RuntimeError as error:  # torch's, of every kind
            self._can_capture = False
            reason = str(error).partition("\n")[0]
            logger.warning(
                "the model cannot be captured as CUDA graphs, so each decode launches its kernels"
                " one by one (--enforce-eager does not try): %s",
                reason,
            )
            return None


class _CudaRecorder:
    """See `Record`. The graphs share their intermediate memory: one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> Recording:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # what is chosen, loaded or allocated at a first run cannot be captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls may not disturb: NCCL's watchdog looks at its events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            states = run()
        return Recording(states, graph.replay)
