"""A request's own books: status, tokens, limits."""

import numpy as np
import pytest

from engine.block_hash import root_hash
from engine.request import Request, Status
from engine.sampling_params import SamplingParams


def make(num_prompt: int = 4, *, output: list[int] | None = None, **sampling: int) -> Request:
    return Request(
        "r",
        np.arange(num_prompt, dtype="<u4"),
        SamplingParams(**sampling),  # type: ignore[arg-type]
        max_model_len=16,
        block_size=4,
        output_token_ids=None if output is None else np.asarray(output, dtype="<u4"),
        root_hash=root_hash(),
    )


LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.RUNNING, Status.FINISHED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.PREEMPTED, Status.FINISHED),
}


@pytest.mark.parametrize("before", Status)
@pytest.mark.parametrize("after", Status)
def test_only_the_drawn_status_changes_are_legal(before: Status, after: Status) -> None:
    """Six changes are legal; any other is a fault in our own code."""
    request = make()
    request.status = before
    if (before, after) in LEGAL:
        request.move_to(after)
        assert request.status is after
    else:
        with pytest.raises(AssertionError):
            request.move_to(after)


def test_blocks_are_hashed_as_tokens_fill_them() -> None:
    """The same tokens give the same hashes, whether they came as prompt or one by one."""
    grown, whole = make(7), make(9)
    for token in (7, 8):
        grown.append(token, b"")
    assert len(whole.block_hashes) == 2
    assert grown.block_hashes == whole.block_hashes


def test_tokens_from_elsewhere_count_as_output() -> None:
    """`max_tokens` and `min_tokens` are counted from the end of the prompt."""
    request = make(4, output=[9, 9], max_tokens=5, min_tokens=3)
    assert (request.num_tokens, request.num_prompt_tokens) == (6, 4)
    assert (request.max_num_tokens, request.min_num_tokens) == (9, 7)


def test_the_models_length_caps_max_tokens() -> None:
    """A request ends at the model's length, with or without `max_tokens`."""
    assert make(4, max_tokens=100).max_num_tokens == 16
    assert make(4).max_num_tokens == 16


def test_a_restarted_request_keeps_its_tokens() -> None:
    """Preemption costs the blocks and what was computed, nothing else."""
    request = make(4)
    request.append(7, b"\x07\0\0\0")
    request.block_ids, request.num_computed_tokens = [1, 2], 4
    request.restart()
    assert request.token_array().tolist() == [0, 1, 2, 3, 7]
    assert (request.num_computed_tokens, request.block_ids, request.unsent_token) == (0, [], b"")
