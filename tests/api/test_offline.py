"""Results of `LLM` as they gather."""

from pathlib import Path

import numpy as np

from api.offline import Job
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer
from engine.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Logprobs,
    OutputDetails,
)
from tests.helpers import byte_folder


def output_of(token: str, finish_reason: FinishReason | None = None) -> EngineCoreOutput:
    token_id = np.array([ord(token)], "<u4")
    logprobs = Logprobs(token_id[None], np.array([[-1.0]], "<f4"), np.array([1], "<u4"))
    details = OutputDetails(new_logprobs=logprobs)
    return EngineCoreOutput("r", token_id.tobytes(), finish_reason, None, details)


def test_what_has_gathered_is_not_copied_for_each_token(tmp_path: Path) -> None:
    """A long answer with log probabilities takes as long per token as a short one."""
    params = SamplingParams(logprobs=0)
    prompt = np.array([97], np.uint32)
    request = EngineCoreRequest("r", prompt, None, params.for_engine(), None, 0.0, None, None, None)
    job = Job("x", [97], [request], params, Tokenizer.load(byte_folder.make(tmp_path)))
    [sequence] = job.sequences

    lists = []
    for output in (output_of("a"), output_of("b"), output_of("c", FinishReason.LENGTH)):
        delta = sequence.processor.push(output)
        assert delta is not None
        sequence._add(delta)
        lists.append(sequence.output.logprobs)

    [result] = job.result().outputs
    assert result.text == "abc"
    assert all(gathered is result.logprobs for gathered in lists)
    assert [list(position) for position in result.logprobs or []] == [[97], [98], [99]]
    assert result.cumulative_logprob == -3.0
