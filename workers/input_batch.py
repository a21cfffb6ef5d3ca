"""The requests a rank works on, as buffers that persist between steps.

A request keeps one row from the step it joins to the step it is dropped. Plans say only what has
changed, so `update` writes few numbers, and `prepare` gathers a step's flat inputs from the rows
with a handful of array operations, whatever the number of requests.

    row 0   a a a a a a . . . .      token ids, as far as they are known
    row 1   free
    row 2   b b b b b b b b b .      prepare: 1 token of row 2, 3 of row 0  ->  b a a a

Step inputs are written to the same memory every time, so that a captured CUDA graph may read it.
For graphs, decodes are padded to a few sizes (`cuda_graphs.py`): the last request comes again.

A row remembers the token that it sampled last. A plan that was made before that token was known
has `OWN_TOKEN` in its place, and the row goes on with its own.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step import NO_TOKEN, ContinuedRequests, KVCacheSpec, NewRequest, SchedulerOutput
from workers.ended_requests import EndedRequests
from workers.forward_context import BatchLayout
from workers.kv_cache import slot_mapping


class NewTokens(NamedTuple):
    """What a plan has appended."""

    request_ids: list[str]
    """One for each token."""
    token_ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a step whose successor is a prompt token that somebody wants the probability
    of."""

    request_id: str
    rows: slice
    """In the flat batch."""
    next_token_ids: np.ndarray
    num_logprobs: int


_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one step: flat tokens of the scheduled requests, in the plan's order.

    Tensors are on the device, and are overwritten when the next step is prepared.
    """

    input_ids: Tensor
    """`[num_tokens]` int64."""
    positions: Tensor
    """`[num_tokens]` int64: each token's place in its own request."""
    layout: BatchLayout
    sampling_ids: list[str]
    """Requests whose known tokens end in this step: they sample the next one."""
    sampling_rows: Tensor
    """`[len(sampling_ids)]` int64: their last tokens in the flat batch."""
    sampling_rows_cpu: np.ndarray
    """`[len(sampling_ids)]`: their rows in the batch."""
    prompt_rows: list[PromptRows]
    token_rows_cpu: np.ndarray
    """`[num_tokens]`: each token's row in the batch."""
    positions_cpu: np.ndarray
    lies_in_place: bool = False
    """A decode of one of the sizes for graphs: of all such steps the model's inputs have the same
    shape and place."""

    @property
    def num_tokens(self) -> int:
        return len(self.positions_cpu)


class InputBatch:
    """Rows of requests, and the inputs of a step made from them.

    Args:
        spec: the most requests, tokens and blocks that a step can bring.
        device: where the model runs.
        graph_sizes: ascending; decodes are padded to the next of them. None are without any.
    """

    def __init__(
        self, spec: KVCacheSpec, device: torch.device, graph_sizes: Sequence[int] = ()
    ) -> None:
        num_rows = spec.max_num_seqs
        self._graph_sizes = graph_sizes
        self._max_model_len = spec.max_model_len
        max_blocks = -(-spec.max_model_len // spec.block_size)
        self._block_size = spec.block_size
        self._row_of: dict[str, int] = {}
        self._free_rows = list(reversed(range(num_rows)))
        # Zeroed memory costs nothing until it is written, so a long row is paid for by its tokens.
        self.token_ids = np.zeros((num_rows, spec.max_model_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._num_computed_tokens = np.zeros(num_rows, np.int64)
        self._block_table = np.zeros((num_rows, max_blocks), np.int32)
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._num_prompt_logprobs: dict[str, int] = {}
        self._sampled = np.zeros(num_rows, np.int64)
        self._ended = EndedRequests(num_rows)
        self._inputs = _StepInputs(spec, max_blocks, device)

    def __len__(self) -> int:
        return len(self._row_of)

    def update(self, plan: SchedulerOutput) -> NewTokens:
        """Let requests leave, join and grow, in this order. Returns the tokens by which those have
        grown that were there before."""
        for request_id in plan.dropped_request_ids:
            self._remove(request_id)
        for request in plan.new_requests:
            self._add(request)
        return self._continue(plan.continued)

    def has_only_ended(self, plan: SchedulerOutput) -> bool:
        """Whether nothing that the plan schedules is worth running. After `update`."""
        return self._ended.include(plan.num_scheduled_tokens.keys())

    def keep_sampled(self, step: Step, token_ids: NDArray[np.uint32]) -> None:
        """Remember the tokens that the step has sampled, in the order of its `sampling_ids`."""
        self._sampled[step.sampling_rows_cpu] = token_ids

    def prepare(self, plan: SchedulerOutput) -> Step:
        """Return the inputs of the requests that the plan schedules, at least one."""
        request_ids = list(plan.num_scheduled_tokens)
        rows = self._rows(request_ids)
        query_lens = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(rows))
        num_reqs, graph_size = len(rows), self._graph_size(query_lens)
        if graph_size is not None:
            rows, query_lens = _padded(rows, graph_size), _padded(query_lens, graph_size)
        computed = self._num_computed_tokens[rows]
        seq_lens = computed + query_lens
        token_rows, positions, query_start = _flatten(rows, computed, query_lens)
        is_sampling = seq_lens >= self.num_tokens[rows]
        is_sampling[num_reqs:] = False
        # In place is what is as wide, and for as long a request, as can be.
        max_seq_len = self._max_model_len if graph_size is not None else int(seq_lens.max())
        num_blocks = -(-max_seq_len // self._block_size)
        inputs = self._inputs.fill(
            input_ids=self.token_ids[token_rows, positions],
            positions=positions,
            slot_mapping=slot_mapping(self._block_table, token_rows, positions, self._block_size),
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=self._block_table[rows, :num_blocks],
            sampling_rows=query_start[1:][is_sampling] - 1,
        )
        return Step(
            input_ids=inputs["input_ids"],
            positions=inputs["positions"],
            layout=BatchLayout(
                query_start=inputs["query_start"],
                seq_lens=inputs["seq_lens"],
                block_table=inputs["block_table"],
                slot_mapping=inputs["slot_mapping"],
                query_start_cpu=query_start,
                seq_lens_cpu=seq_lens,
                max_query_len=int(query_lens.max()),
                max_seq_len=max_seq_len,
                block_size=self._block_size,
            ),
            sampling_ids=list(itertools.compress(request_ids, is_sampling.tolist())),
            sampling_rows=inputs["sampling_rows"],
            sampling_rows_cpu=rows[is_sampling],
            prompt_rows=self._prompt_rows(request_ids, query_start[: num_reqs + 1].tolist()),
            token_rows_cpu=token_rows,
            positions_cpu=positions,
            lies_in_place=graph_size is not None,
        )

    def _graph_size(self, query_lens: NDArray[np.int64]) -> int | None:
        """To how many requests a step is padded, if it is."""
        at = bisect_left(self._graph_sizes, len(query_lens))
        if at == len(self._graph_sizes) or (query_lens != 1).any():
            return None
        return self._graph_sizes[at]

    def _add(self, request: NewRequest) -> None:
        assert request.request_id not in self._row_of, f"{request.request_id} joined twice"
        row = self._row_of[request.request_id] = self._free_rows.pop()
        num_tokens, num_blocks = len(request.token_ids), len(request.block_ids)
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self._num_computed_tokens[row] = request.num_computed_tokens
        self._block_table[row, :num_blocks] = request.block_ids
        self._num_blocks[row] = num_blocks
        self._ended.add(row, request.sampling_params, request.num_prompt_tokens)
        if request.sampling_params.prompt_logprobs is not None:
            self._num_prompt_logprobs[request.request_id] = request.sampling_params.prompt_logprobs

    def _continue(self, continued: ContinuedRequests) -> NewTokens:
        rows = self._rows(continued.request_ids)
        self._num_computed_tokens[rows] = continued.num_computed_tokens
        for index, block_ids in enumerate(continued.new_block_ids):
            if block_ids:
                row = rows[index]
                first = self._num_blocks[row]
                self._block_table[row, first : first + len(block_ids)] = block_ids
                self._num_blocks[row] += len(block_ids)
        return self._append_tokens(continued.request_ids, rows, continued.new_token_ids)

    def _append_tokens(
        self, request_ids: list[str], rows: NDArray[np.int64], new_token_ids: list[bytes]
    ) -> NewTokens:
        token_ids = np.frombuffer(b"".join(new_token_ids), "<u4").astype(np.int64)
        counts = np.fromiter(map(len, new_token_ids), np.int64, len(rows)) // _TOKEN_BYTES
        if (counts != 1).any():
            request_ids = list(_repeat_each(request_ids, counts.tolist()))
        token_rows, positions, _ = _flatten(rows, self.num_tokens[rows], counts)
        self.num_tokens[rows] += counts
        is_own = token_ids == NO_TOKEN
        has_own = is_own.any()
        if has_own:
            token_ids = np.where(is_own, self._sampled[token_rows], token_ids)
        self.token_ids[token_rows, positions] = token_ids
        if has_own:  # of the others the core knows whether they have ended
            self._ended.note(request_ids, token_rows, token_ids, positions + 1)
        return NewTokens(request_ids, token_ids)

    def _remove(self, request_id: str) -> None:
        assert request_id in self._row_of, f"{request_id} left without having joined"
        self._free_rows.append(self._row_of.pop(request_id))
        self._num_prompt_logprobs.pop(request_id, None)
        self._ended.remove(request_id)

    def _rows(self, request_ids: list[str]) -> np.ndarray:
        return np.fromiter(map(self._row_of.__getitem__, request_ids), np.int64, len(request_ids))

    def _prompt_rows(self, request_ids: list[str], query_start: list[int]) -> list[PromptRows]:
        if not self._num_prompt_logprobs:
            return []
        found = []
        for request_id, first, last in zip(
            request_ids, query_start[:-1], query_start[1:], strict=True
        ):
            num_logprobs = self._num_prompt_logprobs.get(request_id)
            if num_logprobs is None:
                continue
            row = self._row_of[request_id]
            computed = int(self._num_computed_tokens[row])
            # The last prompt token has no successor in the prompt: it samples.
            num_rows = min(last - first, int(self.num_prompt_tokens[row]) - 1 - computed)
            if num_rows > 0:
                next_token_ids = self.token_ids[row, computed + 1 : computed + 1 + num_rows]
                rows = slice(first, first + num_rows)
                found.append(PromptRows(request_id, rows, next_token_ids, num_logprobs))
        return found


class _StepInputs:
    """Memory of the step's input tensors: a host and a device copy each, on CPU one and the
    same."""

    def __init__(self, spec: KVCacheSpec, max_blocks: int, device: torch.device) -> None:
        num_reqs, num_tokens = spec.max_num_seqs, spec.max_num_batched_tokens
        sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            "input_ids": ((num_tokens,), torch.int64),
            "positions": ((num_tokens,), torch.int64),
            "slot_mapping": ((num_tokens,), torch.int64),
            "query_start": ((num_reqs + 1,), torch.int32),
            "seq_lens": ((num_reqs,), torch.int32),
            "block_table": ((num_reqs, max_blocks), torch.int32),
            "sampling_rows": ((num_reqs,), torch.int64),
        }
        self._buffers = {
            name: _Buffer(shape, dtype, device) for name, (shape, dtype) in sizes.items()
        }
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fill(self, **arrays: np.ndarray) -> dict[str, Tensor]:
        """Write the arrays at the start of their buffers, and return those parts on the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copies may still read the host's memory
        parts = {name: self._buffers[name].fill(array) for name, array in arrays.items()}
        if self._copied is not None:
            self._copied.record()
        return parts


class _Buffer:
    """Memory of one input, of which a step fills the start. Steps of the same shape, which decodes
    are for a while, share the tensors that say which part that is: to make them takes longer than
    to fill them."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=is_cuda)
        self._device = self._host.to(device)
        self._use(shape)

    def fill(self, array: np.ndarray) -> Tensor:
        """Write an array, and return it on the device."""
        if array.shape != self._shape:
            self._use(array.shape)
        self._array[...] = array
        if self._part is not self._host_part:
            self._part.copy_(self._host_part, non_blocking=True)
        return self._part

    def _use(self, shape: tuple[int, ...]) -> None:
        part = tuple(slice(0, length) for length in shape)
        self._shape = shape
        self._host_part = self._host[part]
        self._array = self._host_part.numpy()
        is_same = self._device is self._host
        self._part = self._host_part if is_same else self._device[part]


def _padded(of_requests: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Repeat the last one until there are `size`."""
    return np.pad(of_requests, (0, size - len(of_requests)), mode="edge")


def _flatten(
    rows: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Lay `counts` tokens of each row one after the other, from its position `first` on.

    Returns:
        row and position of each token, and where each row begins, with the total at the end:
        2 tokens of row 7 from 0 and 3 of row 4 from 5 are [7 7 4 4 4], [0 1 5 6 7] and [0 2 5].
    """
    starts = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    if (counts == 1).all():  # a decode
        return rows, first, starts
    positions = np.arange(starts[-1]) + (first - starts[:-1]).repeat(counts)
    return rows.repeat(counts), positions, starts


def _repeat_each(values: Iterable[str], counts: Iterable[int]) -> Iterable[str]:
    return itertools.chain.from_iterable(map(itertools.repeat, values, counts))
