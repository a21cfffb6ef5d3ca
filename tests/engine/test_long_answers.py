"""An answer of 50,000 tokens: the engine core's work for each of them, counted."""

import pytest

from engine import codec
from tests.helpers.counted_calls import counted_calls
from tests.helpers.engine_core import CoreUnderTest, make_config, make_request
from tests.helpers.fake_executor import FakeExecutor

NUM_STEPS = 160
"""Ten blocks' worth."""


def cost_of_a_token(num_output: int) -> tuple[float, float]:
    """Calls of functions and bytes sent to workers, behind an output of so many tokens."""
    executor = FakeExecutor(model_max_len=60_000)
    config = make_config(
        num_blocks=4_000, block_size=16, max_model_len=60_000, max_num_batched_tokens=60_000
    )
    engine = CoreUnderTest(config, executor)
    output = [7] * num_output or None
    engine.add(make_request("r", 16, output=output, max_tokens=60_000, repetition_penalty=1.2))
    for _ in range(16):
        engine.core.step(lambda: None)
    first = len(executor.plans)
    with counted_calls() as calls:
        for _ in range(NUM_STEPS):
            engine.core.step(lambda: None)
    plans = executor.plans[first:]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"r": 1}] * NUM_STEPS
    num_bytes = sum(len(frame) for plan in plans for frame in codec.Encoder().encode(plan))
    return calls.count / NUM_STEPS, num_bytes / NUM_STEPS


def test_the_fifty_thousandth_token_costs_what_the_first_does() -> None:
    """Scheduling, stop conditions, hashes of blocks, what workers are told."""
    first = cost_of_a_token(0)

    assert cost_of_a_token(50_000) == pytest.approx(first, rel=0.1)
