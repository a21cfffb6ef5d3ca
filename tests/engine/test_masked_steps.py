"""Masks reach each step in time and fit it: several steps under way, planned ahead, preempted.

The simulated workers check each plan and break at the first that is wrong; they sample from what a
mask leaves. The languages here are simple enough to say beforehand what each request must get.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.matcher import Matcher, Words
from engine.wire import EngineCoreRequest, FinishReason
from tests.helpers.engine_core import CoreUnderTest, make_config, make_request
from tests.helpers.simulated_workers import first_context, next_context, next_token

VOCAB_SIZE = 5


def allowed(index: int) -> list[int]:
    """What the language has as output token `index`."""
    return [index % 3, 3 + index % 2]


class Turns(Matcher):
    """A language in which each token is one of two, for `length` tokens."""

    def __init__(self, length: int) -> None:
        self.is_over = False
        self.fault = None
        self.accepted: list[int] = []
        self._length = length

    def accept(self, token_id: int) -> bool:
        assert not self.is_over
        if token_id not in allowed(len(self.accepted)):
            self.fault = "does not fit"
            return False
        self.accepted.append(token_id)
        self.is_over = len(self.accepted) == self._length
        return True

    def fill(self, words: Words) -> bool:
        words[:] = np.uint32(sum(1 << token_id for token_id in allowed(len(self.accepted))))
        return True


def right_answer(request: EngineCoreRequest, length: int | None, max_tokens: int) -> list[int]:
    """The output of a request whose language has `length` tokens; None: it has no language."""
    assert request.prompt_token_ids is not None
    assert request.sampling_params is not None
    context = first_context(request.request_id)
    for token in request.prompt_token_ids.tolist():
        context = next_context(context, token)
    tokens: list[int] = []
    while len(tokens) < min(length or max_tokens, max_tokens):
        possible = allowed(len(tokens)) if length else None
        params = request.sampling_params
        tokens.append(next_token(context, len(tokens), params, VOCAB_SIZE, possible))
        context = next_context(context, tokens[-1])
    return tokens


def run(
    engine: CoreUnderTest, wanted: list[tuple[int | None, int, int]], **sampling: Any
) -> dict[str, EngineCoreRequest]:
    """Run requests of (length of the language, length of the prompt, max_tokens), beside each
    other."""
    sent = {}
    for i, (length, num_prompt, max_tokens) in enumerate(wanted):
        message = make_request(str(i), num_prompt, max_tokens=max_tokens, **sampling)
        request = engine.core.prepare(message)
        if length:
            request.matcher = Turns(length)
        engine.core.add(request)
        sent[message.request_id] = message
    engine.run()
    return sent


requests = st.lists(
    st.tuples(st.none() | st.integers(1, 9), st.integers(1, 12), st.integers(1, 12)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150)
@given(
    wanted=requests,
    stages=st.sampled_from([0, 1, 2, 3]),  # 0: one stage, planned ahead
    spare_blocks=st.integers(0, 6),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(5, 20),
)
def test_each_request_gets_what_its_language_leaves(
    wanted: list[tuple[int | None, int, int]],
    stages: int,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    """However many steps are under way, and however often it is preempted."""
    config = make_config(
        num_blocks=12 + spare_blocks,
        block_size=2,
        max_model_len=24,
        stages=max(1, stages),
        ahead=not stages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    engine = CoreUnderTest(config)
    sent = run(engine, wanted)
    for request, (length, num_prompt, max_tokens) in zip(sent.values(), wanted, strict=True):
        most = min(max_tokens, 24 - num_prompt)
        received = engine.received[request.request_id]
        assert received.token_ids == right_answer(request, length, most)
        is_whole = length is not None and length <= most
        reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
        assert received.finish_reasons == [reason]


@pytest.mark.parametrize(("stages", "ahead"), [(1, False), (1, True), (3, False)])
def test_only_steps_in_which_somebody_is_bound_await_masks(stages: int, ahead: bool) -> None:
    """The others are run in one call."""
    engine = CoreUnderTest(make_config(stages=stages, ahead=ahead))
    run(engine, [(3, 2, 9), (None, 2, 9), (None, 2, 9)])
    bound = [plan for plan in engine.workers.plans if plan.awaits_masks]
    assert all("0" in plan.num_scheduled_tokens for plan in bound)
    assert len(bound) < len(engine.workers.plans)
