"""Rows persist between steps, and a step's flat inputs are those of the scheduled requests."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.codec import pack_tokens, token_array
from engine.sampling_params import SamplingParams
from engine.step import OWN_TOKEN, ContinuedRequests, KVCacheSpec, NewRequest, SchedulerOutput
from workers.input_batch import InputBatch, Step

SPEC = KVCacheSpec(
    num_blocks=50, block_size=4, max_model_len=32, max_num_seqs=3, max_num_batched_tokens=24
)


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(SPEC, torch.device("cpu"))


def new(
    name: str, token_ids: list[int], block_ids: list[int], computed: int = 0, **params: Any
) -> NewRequest:
    return NewRequest(
        name, token_array(token_ids), len(token_ids), computed, block_ids, SamplingParams(**params)
    )


def step(batch: InputBatch, plan: SchedulerOutput) -> Step:
    batch.update(plan)
    return batch.prepare(plan)


def test_inputs_are_in_the_plans_order(batch: InputBatch) -> None:
    """Tokens, positions and slots of each request, one after the other; who has all tokens computed
    samples."""
    made = step(
        batch,
        SchedulerOutput(
            1,
            {"b": 2, "a": 3},
            new_requests=[
                new("a", [10, 11, 12, 13, 14], [7, 2], computed=1),
                new("b", [20, 21], [9]),
            ],
        ),
    )
    assert made.input_ids.tolist() == [20, 21, 11, 12, 13]
    assert made.positions.tolist() == [0, 1, 1, 2, 3]
    assert made.layout.slot_mapping.tolist() == [36, 37, 29, 30, 31]
    assert made.layout.query_start.tolist() == [0, 2, 5]
    assert made.layout.seq_lens.tolist() == [2, 4]
    assert made.layout.block_table[1, 0] == 7
    assert (made.sampling_ids, made.sampling_rows.tolist()) == (["b"], [1])


def test_continued_requests_grow(batch: InputBatch) -> None:
    """New tokens and blocks go behind the old ones; several tokens at once are possible."""
    step(
        batch,
        SchedulerOutput(1, {"a": 3, "b": 2}, [new("a", [1, 2, 3], [5]), new("b", [4, 5], [6])]),
    )
    grown = ContinuedRequests(
        ["b", "a"], [2, 3], [pack_tokens([8]), pack_tokens([6, 7])], [[], [9]]
    )
    made = step(batch, SchedulerOutput(2, {"a": 2, "b": 1}, continued=grown))
    assert made.input_ids.tolist() == [6, 7, 8]
    assert made.layout.slot_mapping.tolist() == [5 * 4 + 3, 9 * 4, 6 * 4 + 2]
    assert made.sampling_ids == ["a", "b"]


def test_a_row_goes_on_with_the_token_that_it_sampled(batch: InputBatch) -> None:
    """Where the plan has OWN_TOKEN; what the core has accepted it sends, in the same plan."""
    made = step(
        batch,
        SchedulerOutput(1, {"a": 2, "b": 1}, [new("a", [1, 2], [5]), new("b", [4], [6])]),
    )
    batch.keep_sampled(made, np.array([77, 88], np.uint32))
    grown = ContinuedRequests(["b", "a"], [1, 2], [OWN_TOKEN, pack_tokens([66])], [[], []])
    plan = SchedulerOutput(2, {"b": 1, "a": 1}, continued=grown)
    assert batch.update(plan).token_ids.tolist() == [88, 66]
    made = batch.prepare(plan)
    assert made.input_ids.tolist() == [88, 66]
    assert made.positions.tolist() == [1, 2]


def test_who_has_ended_with_its_own_token_is_known(batch: InputBatch) -> None:
    """Once all that a plan schedules has: by end or stop tokens, not before `min_tokens`."""
    ends: dict[str, Any] = {"eos_token_ids": (8, 9), "stop_token_ids": (7,)}
    made = step(
        batch,
        SchedulerOutput(
            1,
            {"a": 1, "b": 1, "c": 1},
            [
                new("a", [1], [5], **ends),
                new("b", [2], [6], ignore_eos=True, **ends),
                new("c", [3], [7], min_tokens=2, **ends),
            ],
        ),
    )
    batch.keep_sampled(made, np.array([9, 9, 7], np.uint32))
    grown = ContinuedRequests(["a", "b", "c"], [1, 1, 1], [OWN_TOKEN] * 3, [[]] * 3)
    batch.update(SchedulerOutput(2, {"a": 1, "b": 1, "c": 1}, continued=grown))

    def has_only_ended(*names: str) -> bool:
        return batch.has_only_ended(SchedulerOutput(2, dict.fromkeys(names, 1)))

    assert [has_only_ended(name) for name in "abc"] == [True, False, False]
    assert not has_only_ended("a", "b")
    made = batch.prepare(SchedulerOutput(2, {"a": 1, "b": 1, "c": 1}))
    batch.keep_sampled(made, np.array([1, 7, 8], np.uint32))
    grown = ContinuedRequests(["b", "c"], [2, 2], [OWN_TOKEN] * 2, [[]] * 2)
    batch.update(SchedulerOutput(3, {"b": 1, "c": 1}, continued=grown))
    assert has_only_ended("a", "b", "c")
    batch.update(SchedulerOutput(4, {"a": 1}, [new("a", [1], [5])], dropped_request_ids=["a"]))
    assert not has_only_ended("a")


def test_rows_are_given_to_the_next(batch: InputBatch) -> None:
    """As many requests as there are rows come and go for ever, also within one plan; nothing of
    the former is seen."""
    for i in range(20):
        plan = SchedulerOutput(
            i,
            {f"r{i}": 2},
            new_requests=[new(f"r{i}", [i, i + 1], [i])],
            dropped_request_ids=[f"r{i - 3}"] if i >= 3 else [],
        )
        made = step(batch, plan)
        assert made.input_ids.tolist() == [i, i + 1]
        assert made.layout.slot_mapping.tolist() == [4 * i, 4 * i + 1]
    assert len(batch) == 3


def test_unscheduled_requests_keep_their_rows(batch: InputBatch) -> None:
    """A request may pause for some steps, and goes on where it was."""
    step(batch, SchedulerOutput(1, {"a": 2}, [new("a", [1, 2, 3, 4], [5])]))
    step(batch, SchedulerOutput(2, {"b": 1}, [new("b", [9], [6])]))
    made = step(
        batch, SchedulerOutput(3, {"a": 2}, continued=ContinuedRequests(["a"], [2], [b""], [[]]))
    )
    assert made.input_ids.tolist() == [3, 4]


def test_prompt_rows_end_before_the_last_prompt_token(batch: InputBatch) -> None:
    """Of a chunk, the tokens whose successor is in the prompt; a decode has none."""
    asking = NewRequest(
        "a", token_array([1, 2, 3, 4, 5]), 5, 0, [5, 6], SamplingParams(prompt_logprobs=3)
    )
    made = step(batch, SchedulerOutput(1, {"b": 1, "a": 3}, [asking, new("b", [9], [7])]))
    (asked,) = made.prompt_rows
    assert (asked.rows, asked.next_token_ids.tolist()) == (slice(1, 4), [2, 3, 4])
    assert asked.num_logprobs == 3

    rest = ContinuedRequests(["a"], [3], [b""], [[]])
    (asked,) = step(batch, SchedulerOutput(2, {"a": 2}, continued=rest)).prompt_rows
    assert (asked.rows, asked.next_token_ids.tolist()) == (slice(0, 1), [5])

    decode = ContinuedRequests(["a"], [5], [pack_tokens([6])], [[]])
    assert step(batch, SchedulerOutput(3, {"a": 1}, continued=decode)).prompt_rows == []


def test_inputs_keep_their_address(batch: InputBatch) -> None:
    """Each step's inputs lie where the last ones did, as a captured graph would need."""
    steps = [
        step(batch, SchedulerOutput(i, {f"r{i}": 2}, [new(f"r{i}", [1, 2], [i])])) for i in range(2)
    ]
    for name in ("input_ids", "positions", "sampling_rows"):
        assert len({getattr(made, name).data_ptr() for made in steps}) == 1
    for name in ("slot_mapping", "block_table", "query_start", "seq_lens"):
        assert len({getattr(made.layout, name).data_ptr() for made in steps}) == 1


def test_a_request_that_joins_twice_is_our_own_fault(batch: InputBatch) -> None:
    """The core sends a request once until it drops it."""
    plan = SchedulerOutput(1, {"a": 1}, [new("a", [1], [5])])
    batch.update(plan)
    with pytest.raises(AssertionError, match="a joined twice"):
        batch.update(plan)


def test_a_request_that_leaves_without_having_joined_is_our_own_fault(batch: InputBatch) -> None:
    """The core drops whom it has sent, once: anything else would leave rows to the dead."""
    with pytest.raises(AssertionError, match="a left without having joined"):
        batch.update(SchedulerOutput(1, {}, dropped_request_ids=["a"]))


def test_long_rows_cost_nothing_until_they_are_used() -> None:
    """A batch for 256 requests of a million tokens is made at once."""
    spec = KVCacheSpec(100, 16, max_model_len=1 << 20, max_num_seqs=256, max_num_batched_tokens=8)
    batch = InputBatch(spec, torch.device("cpu"))
    assert batch.token_ids.nbytes == 1 << 30
    made = step(batch, SchedulerOutput(1, {"a": 2}, [new("a", [1, 2], [0])]))
    assert np.array_equal(made.positions_cpu, [0, 1])
