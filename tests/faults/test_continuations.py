"""A sequence that goes on at another rank is the one that it would have been: an engine core over a
real worker gets what another had put out already."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from engine.wire import EngineCoreRequest
from tests.helpers.engine_core import CoreUnderTest, Received
from tests.helpers.in_process_worker import InProcessWorker
from tests.workers.test_planned_ahead import (
    folder,  # noqa: F401  # a fixture
    make_engine,  # noqa: F401  # a fixture
    requests,
)

MakeEngine = Callable[..., tuple[CoreUnderTest, InProcessWorker]]


def run(engine: CoreUnderTest, asked: list[EngineCoreRequest]) -> dict[str, Received]:
    engine.add(*asked)
    engine.run()
    return engine.received


def continued(request: EngineCoreRequest, tokens: list[int]) -> EngineCoreRequest:
    """Behind these tokens; log probabilities of the prompt have been told."""
    assert request.sampling_params is not None
    return msgspec.structs.replace(
        request,
        sampling_params=msgspec.structs.replace(request.sampling_params, prompt_logprobs=None),
        output_token_ids=np.asarray(tokens, dtype="<u4"),
    )


@pytest.mark.row("F-04")
@pytest.mark.parametrize(
    ("share", "ahead"), [(0.0, False), (0.5, False), (0.5, True), (1.0, False)]
)
def test_a_sequence_is_the_same_wherever_it_was_cut(
    make_engine: MakeEngine,  # noqa: F811
    share: float,
    ahead: bool,
) -> None:
    """Greedy and seeded, with penalties, least lengths, bad words, thoughts: tokens, ends and log
    probabilities. At 1.0 only the last token is missing."""
    whole = run(make_engine(ahead)[0], requests())
    cut: dict[str, int] = {}
    asked = []
    for request in requests():
        tokens = whole[request.request_id].token_ids
        cut[request.request_id] = min(len(tokens) - 1, round(share * len(tokens)))
        asked.append(continued(request, tokens[: cut[request.request_id]]))
    rest = run(make_engine(ahead)[0], asked)

    for request_id, expected in whole.items():
        found, at = rest[request_id], cut[request_id]
        assert expected.token_ids[:at] + found.token_ids == expected.token_ids, request_id
        assert found.finish_reasons == expected.finish_reasons
        behind = expected.new_logprobs[at:]
        for one, other in zip(found.new_logprobs, behind, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            assert np.array_equal(one.ranks, other.ranks)
