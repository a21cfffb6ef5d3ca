"""Decodes on a GPU, captured once for each of some batch sizes, and replayed.

A decode is hundreds of small kernels, which the GPU runs faster than Python launches them. A CUDA
graph is the list of them, launched as one; it reads and writes the memory that it was captured
with. So the inputs of a step lie in the same place every time (`input_batch.py`), where the layout
is as wide as it can be: whole rows of the block table, and the longest request there may be.

A batch is padded to the next size by its last request again, which computes the same once more,
and writes the same keys and values to the same slot: no slot is set aside, no kernel knows of it.

Captured is what lies between two exchanges with other pipeline stages; the head and the sampler are
not. Tensor ranks capture the same steps in the same order, as their plans are the same.

A model that cannot be captured on one rank runs as it is on all, and the log says so.

NOTE: not proved on a GPU yet; `tests/gpu/test_cuda_graphs.py` does where there is one. Without one,
`tests/workers/test_cuda_graphs.py` proves that replays find all that they read, and what padding
does.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workers.input_batch import Step

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Few, as each costs memory and a part of a second; and near to each other, so that a step is
padded to less than twice its size, from 16 on to half as much again at most."""

Forward = Callable[[Step, Tensor | None], Tensor]
"""From a step and, on later pipeline stages, the states received, to states."""


class Recording(NamedTuple):
    """What has been captured."""

    states: Tensor
    """Where the result is after a replay."""
    replay: Callable[[], object]


Record = Callable[[Callable[[], Tensor]], Recording]
"""Captures what a function does to the device's memory; it need not have been done by then. Raises
`CannotCapture`, or what the function itself does."""


class CannotCapture(Exception):
    """What the model does cannot be captured. Says why."""


def sizes(most: int) -> list[int]:
    """Return the batch sizes to capture where no batch has more than `most` requests, at least
    one."""
    if most > _SIZES[-1]:
        return list(_SIZES)
    return [*_SIZES[: bisect_left(_SIZES, most)], most]


class CudaGraphs:
    """Runs a model's steps, those that lie in place as graphs.

    Args:
        forward: the part that is captured.
        recorder: makes what captures.
    """

    def __init__(self, forward: Forward, recorder: Callable[[], Record] | None = None) -> None:
        self._forward = forward
        self._recorder = recorder or _CudaRecorder
        self._record: Record | None = None
        self._captured: dict[int, tuple[Recording, Tensor | None]] = {}
        self.has_failed = False
        """Something could not be captured, and steps run as they are."""

    def clear(self) -> None:
        """Wait for the device and forget all graphs: before the memory that they read becomes
        another's, and before a group of ranks whose collectives they hold is left."""
        if self._captured and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._captured.clear()
        self._record, self.has_failed = None, False

    def run(self, step: Step, received: Tensor | None) -> Tensor:
        """Return the states of a step; where it lies in place, they last until the next step."""
        if not step.lies_in_place or self.has_failed:
            return self._forward(step, received)
        if step.num_tokens not in self._captured:
            try:
                self._captured[step.num_tokens] = self._capture(step, received)
            except CannotCapture as error:
                self.has_failed = True
                logger.warning(
                    "the model cannot be captured as CUDA graphs, so each decode launches its"
                    " kernels one by one (--enforce-eager does not try): %s",
                    error,
                )
                return self._forward(step, received)
        recording, kept = self._captured[step.num_tokens]
        if kept is not None and received is not None:
            kept.copy_(received)
        recording.replay()
        return recording.states

    def _capture(self, step: Step, received: Tensor | None) -> tuple[Recording, Tensor | None]:
        kept = None if received is None else received.clone()
        self._record = self._record or self._recorder()
        return self._record(lambda: self._forward(step, kept)), kept


class _CudaRecorder:
    """See `Record`. The graphs share their intermediate memory: one runs at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Recording:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            run()  # what is chosen, loaded or allocated at a first run cannot be captured
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls may not disturb: NCCL's watchdog looks at events meanwhile.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                states = run()
        except RuntimeError as error:  # torch's, of every kind
            torch.cuda.set_stream(before)  # a capture that fails twice does not go back to it
            raise CannotCapture(_first_cause(error)) from error
        return Recording(states, graph.replay)


def _first_cause(error: BaseException) -> str:
    """What the model did: the end of a capture that it has spoiled raises on top."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]
